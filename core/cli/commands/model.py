"""`isotrain predict`, `isotrain evaluate` and `isotrain export`: models of finished runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.core.cli.argument_types import RUN_HELP, positive_int, run_location
from isotrain.core.cli.command import Command
from isotrain.core.cli.support import add_working_directory_to_path
from isotrain.core.contracts.state import FORMS
from isotrain.core.errors import IsotrainError
from isotrain.core.json_format import FORMAT, json_page

if TYPE_CHECKING:
    import numpy as np


def predict(options: argparse.Namespace) -> None:
    """Predicts, and writes the predictions to a file."""
    from isotrain.core.planning.cluster_environment import require_single_process
    from isotrain.core.results.predict_and_export import predict as predict_samples
    from isotrain.core.system.files import make_folder, removed_on_failure

    require_single_process("predict")
    add_working_directory_to_path()
    target = _output(options.output)
    with removed_on_failure(target.parent):
        make_folder(target.parent, f"--output: the folder of {target}")
        predictions = predict_samples(
            options.run,
            _data(options.data),
            spec=options.spec,
            backend=options.backend,
            replicas=options.replicas,
            quiet=options.quiet,
        )
        arrays = dict(_named_arrays(predictions))
        _write(arrays, target)
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    if options.json:
        print(json_page({"format": FORMAT, "output": str(target), "shapes": shapes}))
        return
    for name, shape in shapes.items():
        print(f"{target}: {name} of shape {shape}")


def evaluate(options: argparse.Namespace) -> None:
    """Evaluates, and prints loss and metrics."""
    from isotrain.core.planning.cluster_environment import require_single_process
    from isotrain.core.results.predict_and_export import evaluate as evaluate_model

    require_single_process("evaluate")
    add_working_directory_to_path()
    measured = evaluate_model(
        options.run,
        None if options.data is None else _data(options.data),
        metrics=options.metric or None,
        spec=options.spec,
        backend=options.backend,
        replicas=options.replicas,
        quiet=options.quiet,
    )
    if options.json:
        print(json_page({"format": FORMAT, "metrics": measured}))
        return
    width = max(map(len, measured))
    for name, number in measured.items():
        print(f"{name:{width}}  {number:.6g}")


def export(options: argparse.Namespace) -> None:
    """Exports the model, and prints the path of the file or folder written."""
    from isotrain.core.planning.cluster_environment import require_single_process
    from isotrain.core.results.predict_and_export import export as export_model

    require_single_process("export")
    add_working_directory_to_path()
    data = None if options.data is None else _data(options.data)
    path = export_model(
        options.run,
        options.output,
        to=options.to,
        spec=options.spec,
        data=data,
        include=options.include,
        exclude=options.exclude,
        quiet=options.quiet,
    )
    if options.json:
        print(json_page({"format": FORMAT, "output": str(path)}))
    else:
        print(path)


def _output(name: str) -> Path:
    """The path of `--output`, checked to end in .npy or .npz."""
    target = Path(name)
    if target.suffix not in (".npy", ".npz"):
        raise IsotrainError(f"--output: expected a file .npy or .npz, received {name!r}.")
    return target


def _write(arrays: Mapping[str, np.ndarray], target: Path) -> None:
    """Writes arrays of any shape and dtype: one to .npy, any number to .npz."""
    import numpy as np

    from isotrain.core.system.files import atomic_file

    if target.suffix == ".npy" and len(arrays) > 1:
        raise IsotrainError(f"--output {target}: the model has several outputs; write .npz.")
    try:
        with atomic_file(target) as stream:
            if target.suffix == ".npy":
                np.save(stream, next(iter(arrays.values())))
            else:
                np.savez(stream, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        reason = error.strerror or error
        raise IsotrainError(f"--output: {target} cannot be written: {reason}.") from error


def _data(reference: str) -> Any:
    """The data that `--data` refers to: an .npy file, or an import string."""
    if reference.endswith(".npy"):
        from isotrain.core.data.array_files import npy

        return npy(reference)
    from isotrain.core.spec import import_strings

    return import_strings.absolute(reference, Path.cwd())


def _named_arrays(tree: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Arrays of a pytree, any shapes, with their paths, such as `head/0`; a single array is `predictions`."""
    if tree is None:
        return
    if not isinstance(tree, dict | list | tuple):
        yield name or "predictions", tree
        return
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in children:
        yield from _named_arrays(child, f"{name}/{key}" if name else str(key))


def _add_predict_arguments(command: argparse.ArgumentParser) -> None:
    _add_finished_run_arguments(command)
    command.add_argument(
        "--data",
        required=True,
        metavar="DATA",
        help="samples to predict: a reference to an array or function (file.py:name), or an .npy file",
    )
    command.add_argument(
        "--output",
        required=True,
        metavar="FILE",
        help="file to write: .npy; or .npz, which a model with several outputs needs",
    )
    _add_replica_arguments(command)


def _add_evaluate_arguments(command: argparse.ArgumentParser) -> None:
    _add_finished_run_arguments(command)
    command.add_argument(
        "--data",
        metavar="DATA",
        help="data to evaluate on: a reference to a data set or function (file.py:name; default: the run's"
        " validation data)",
    )
    command.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="METRIC",
        help="metric in place of the run's: a Keras name or a reference; may be repeated",
    )
    _add_replica_arguments(command)


def _add_replica_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-b",
        "--backend",
        metavar="NAME[:COLLECTIVE]",
        help="backend (default: the run's)",
    )
    command.add_argument(
        "-n",
        "--replicas",
        type=positive_int,
        metavar="N",
        help="number of replicas that divide the samples (default: one per usable GPU, or one)",
    )


def _add_export_arguments(command: argparse.ArgumentParser) -> None:
    _add_finished_run_arguments(command)
    command.add_argument(
        "--to",
        choices=FORMS,
        metavar="FORM",
        help=f"format (default: by the name of FILE): {', '.join(FORMS)}",
    )
    command.add_argument(
        "--output", required=True, metavar="FILE", help="file to write; for saved-model a folder"
    )
    command.add_argument(
        "--data",
        metavar="DATA",
        help="samples from which the inputs' shapes and dtypes are taken, as for predict (default: the run's"
        " data)",
    )
    for name, help_text in (
        ("--include", "write only weights of matching names (safetensors only; repeatable)"),
        ("--exclude", "write no weights of matching names (safetensors only; repeatable)"),
    ):
        command.add_argument(name, action="append", default=[], metavar="PATTERN", help=help_text)


def _add_finished_run_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "run",
        type=run_location,
        metavar="RUN",
        help=f"{RUN_HELP}; or a checkpoint: its folder or URL",
    )
    command.add_argument(
        "--spec",
        metavar="SPEC",
        help="the run's spec, or its run directory; needed for a checkpoint, which may come from"
        " anywhere, and where the run directory does not name the function that makes the model",
    )


PREDICT = Command(
    "predict",
    "predict with the model of a finished run",
    "Predicts with the model of a finished run, over replicas, in separate processes: one row\n"
    "per sample, in order. The result is the same on every backend with any number of replicas.",
    """\
examples:
  isotrain predict runs/digits-20260102-030405 --data my_data.py:images --output predictions.npy
  isotrain predict runs/digits-20260102-030405 --data images.npy --output predictions.npy \\
      --replicas 4""",
    add_arguments=_add_predict_arguments,
    module=__name__,
)
EVALUATE = Command(
    "evaluate",
    "evaluate the model of a finished run",
    "Evaluates the model of a finished run, over replicas, in separate processes, and prints\n"
    "loss and metrics. They are the same on every backend with any number of replicas.",
    """\
examples:
  isotrain evaluate runs/digits-20260102-030405
  isotrain evaluate runs/digits-20260102-030405 --data my_data.py:test --metric accuracy""",
    add_arguments=_add_evaluate_arguments,
    module=__name__,
)
EXPORT = Command(
    "export",
    "export the model of a finished run",
    "Exports the model of a finished run to a format that opens without isotrain, in a separate\n"
    "process. docs/models.md lists which program opens which format.",
    """\
examples:
  isotrain export runs/digits-20260102-030405 --to keras --output digits.keras
  isotrain export runs/digits-20260102-030405 --to torch --output digits.pt
  isotrain export runs/digits-20260102-030405 --to onnx --output digits.onnx""",
    add_arguments=_add_export_arguments,
    module=__name__,
)
