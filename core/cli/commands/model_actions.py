"""What the commands for models of finished runs do; `model_arguments` has their arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.core.cli.support import add_working_directory_to_path
from isotrain.core.errors import IsotrainError
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.planning.cluster_environment import require_single_process
from isotrain.core.system.files import atomic_file, make_folder, removed_on_failure

if TYPE_CHECKING:
    import numpy as np


def predict(options: argparse.Namespace) -> None:
    """Predicts, and writes the predictions to a file."""
    from isotrain.core.results.export import predict as predicted

    require_single_process("predict")
    add_working_directory_to_path()
    target = _output(options.output)
    with removed_on_failure(target.parent):
        make_folder(target.parent, f"--output: the folder of {target}")
        found = predicted(
            options.run,
            _data(options.data),
            spec=options.spec,
            backend=options.backend,
            replicas=options.replicas,
        )
        arrays = dict(_named(found))
        _write(arrays, target)
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    if options.json:
        print(json_page({"format": FORMAT, "output": str(target), "shapes": shapes}))
        return
    for name, shape in shapes.items():
        print(f"{target}: {name} of shape {shape}")


def export(options: argparse.Namespace) -> None:
    """Writes a model, and prints where."""
    from isotrain.core.results.export import export as exported

    require_single_process("export")
    add_working_directory_to_path()
    data = None if options.data is None else _data(options.data)
    found = exported(options.run, options.output, to=options.to, spec=options.spec, data=data)
    if options.json:
        print(json_page({"format": FORMAT, "output": str(found)}))
    else:
        print(found)


def _output(name: str) -> Path:
    target = Path(name)
    if target.suffix not in (".npy", ".npz"):
        raise IsotrainError(f"--output: expected a file .npy or .npz, received {name!r}.")
    return target


def _write(arrays: Mapping[str, np.ndarray], target: Path) -> None:
    import numpy as np

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


def _data(given: str) -> Any:
    """What `--data` names: an array file, or what a reference stands for."""
    if given.endswith(".npy"):
        from isotrain.core.data.array_files import npy

        return npy(given)
    from isotrain.core.spec import import_strings

    return import_strings.absolute(given, Path.cwd())


def _named(tree: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of a tree, each by the way to it, such as `head/0`; a single one is `predictions`."""
    if tree is None:
        return
    if not isinstance(tree, dict | list | tuple):
        yield name or "predictions", tree
        return
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, part in parts:
        yield from _named(part, f"{name}/{key}" if name else str(key))
