"""The arguments of the commands for models of finished runs."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import count

PREDICT_EXAMPLES = """\
examples:
  isotrain predict runs/digits-20260102-030405 --data my_data.py:images --output predictions.npy
  isotrain predict runs/digits-20260102-030405 --data images.npy --output predictions.npy \\
      --replicas 4"""

DESCRIPTIONS = {
    "predict": "Predicts with the model of a finished run, over replicas, in processes of its own: a row\n"
    "for each sample, in order. The result is the same on every backend with any number of replicas.",
}


def describe_predict(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `predict`."""
    _describe_run(command)
    command.add_argument(
        "--data",
        required=True,
        metavar="DATA",
        help="what to predict for: a function or array by its reference (file.py:name), or an .npy file",
    )
    command.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="where to write: .npy; or .npz, which several outputs need",
    )
    command.add_argument(
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="what to run on (default: what the run was on)",
    )
    command.add_argument(
        "--replicas",
        type=count,
        metavar="N",
        help="how many copies of the model share the samples (default: one per usable GPU, or one)",
    )


def _describe_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", metavar="DIR", help="the directory of a finished run")
    command.add_argument(
        "--spec",
        metavar="SPEC",
        help="what was run; needed where the run directory cannot say which function made the model",
    )
