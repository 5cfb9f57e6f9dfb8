"""`isotrain init`: writes a spec with a model and data that train at once."""

from __future__ import annotations

import argparse
import shlex
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from isotrain.core.cli.command import Command
from isotrain.core.errors import PlanError
from isotrain.core.json_format import FORMAT, json_page
from isotrain.core.plugins.manager import PluginManager, plugin_manager

_SPEC = "train.yaml"
_PORTABLE = "portable"
"""Kind of model that every framework with Keras trains."""
_FRAMEWORKLESS = "numpy"
"""Kind of model, and the backend for it, where no framework is installed."""


def init(options: argparse.Namespace) -> None:
    """Writes the files, and prints what to do next."""
    folder = Path(options.folder)
    kind = model_kind(plugin_manager())
    texts = _texts(kind)
    existing = [str(folder / name) for name in texts if (folder / name).exists()]
    if existing:
        raise PlanError(
            f"init: {existing[0]} exists already. Name another folder: isotrain init NAME."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"init: {folder} cannot be written: {error}.") from error
    files = [str(folder / name) for name in texts]
    command = f"isotrain run {_SPEC} --replicas 2"
    if options.json:
        print(json_page({"format": FORMAT, "files": files, "model": kind, "command": command}))
        return
    print(f"wrote {', '.join(files)}")
    if kind == _FRAMEWORKLESS:
        print(
            "No framework is installed: this trains in NumPy. `isotrain backends` lists the others."
        )
    enter = "" if folder == Path() else f"  cd {shlex.quote(str(folder))}\n"
    print(f"\nnext:\n{enter}  {command}")


def model_kind(host: PluginManager) -> str:
    """Kind of model that the first available backend trains: `portable`, a framework's name, or `numpy`."""
    adapters = (host.backend(name) for name in host.backends.names())
    frameworks = [
        adapter.framework
        for adapter in adapters
        if adapter.conformance_models is None and adapter.availability().available
    ]
    if not frameworks:
        return _FRAMEWORKLESS
    if find_spec("keras") is not None:
        return _PORTABLE
    return next((each for each in frameworks if _model_file(each).is_file()), _FRAMEWORKLESS)


def _model_file(kind: str) -> resources.abc.Traversable:
    return resources.files("isotrain.core.cli") / "starter" / f"model-{kind}.py.txt"


def _texts(kind: str) -> dict[str, str]:
    """Text of each file, by name."""
    starter = resources.files("isotrain.core.cli") / "starter"
    spec = (starter / f"{_SPEC}.txt").read_text(encoding="utf-8")
    if kind == _FRAMEWORKLESS:
        spec += f"backend: {_FRAMEWORKLESS}\n"
    return {
        _SPEC: spec,
        "model.py": _model_file(kind).read_text(encoding="utf-8"),
        "data.py": (starter / "data.py.txt").read_text(encoding="utf-8"),
    }


def _add_init_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder", metavar="DIR", nargs="?", default=".", help="where to write (default: here)"
    )


INIT = Command(
    "init",
    "write a spec, a model and data that train at once",
    "Writes train.yaml, model.py and data.py, to start from: a small classifier for what is installed\n"
    "here, in Keras, torch or NumPy. The data are made by data.py; nothing is downloaded.",
    """\
examples:
  isotrain init spirals
  cd spirals && isotrain run train.yaml --replicas 2""",
    add_arguments=_add_init_arguments,
    module=__name__,
)
