"""The arguments of the commands for models of finished runs."""

from __future__ import annotations

import argparse

from isotrain.core.cli.argument_types import positive_int
from isotrain.core.cli.command import Command
from isotrain.core.contracts.state import FORMS


def _add_predict_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `predict`."""
    _add_finished_arguments(command)
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
        type=positive_int,
        metavar="N",
        help="how many copies of the model share the samples (default: one per usable GPU, or one)",
    )


def _add_export_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `export`."""
    _add_finished_arguments(command)
    command.add_argument(
        "--to",
        choices=FORMS,
        metavar="FORM",
        help=f"the form (default: by FILE): {', '.join(FORMS)}",
    )
    command.add_argument(
        "--output", required=True, metavar="FILE", help="where to write; for saved-model a folder"
    )
    command.add_argument(
        "--data",
        metavar="DATA",
        help="samples that show what the inputs are like, as for predict (default: the run's data)",
    )


def _add_finished_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "run", metavar="RUN", help="the directory of a run, or a checkpoint: its folder or URL"
    )
    command.add_argument(
        "--spec",
        metavar="SPEC",
        help="what was run, or the directory of that run; needed for a checkpoint, which may come from"
        " anywhere, and where the run directory cannot say which function made the model",
    )


PREDICT = Command(
    "predict",
    "predict with the model of a finished run",
    "Predicts with the model of a finished run, over replicas, in processes of its own: a row\n"
    "for each sample, in order. The result is the same on every backend with any number of replicas.",
    """\
examples:
  isotrain predict runs/digits-20260102-030405 --data my_data.py:images --output predictions.npy
  isotrain predict runs/digits-20260102-030405 --data images.npy --output predictions.npy \\
      --replicas 4""",
    add_arguments=_add_predict_arguments,
    module="isotrain.core.cli.commands.model_actions",
)
EXPORT = Command(
    "export",
    "write the model of a finished run for others",
    "Writes the model of a finished run in a form that others open without isotrain, in a process\n"
    "of its own. docs/in-and-out.md says who opens what.",
    """\
examples:
  isotrain export runs/digits-20260102-030405 --to keras --output digits.keras
  isotrain export runs/digits-20260102-030405 --to torch --output digits.pt
  isotrain export runs/digits-20260102-030405 --to onnx --output digits.onnx""",
    add_arguments=_add_export_arguments,
    module="isotrain.core.cli.commands.model_actions",
)
