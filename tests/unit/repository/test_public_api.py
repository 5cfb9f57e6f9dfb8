"""What is public is frozen: every name, parameter and method, as `public_api.txt` lists them.

After an intended change, `python tests/unit/repository/test_public_api.py` writes the list. Something added
raises the second number of `isotrain.core.plugins.hookspecs.API_VERSION`; something changed or removed, the
first.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import isotrain
import isotrain.plugin
from isotrain.core.data import sources as core_sources
from isotrain.core.plugins import hookspecs, plugin

LISTED = Path(__file__).with_name("public_api.txt")
PAGE = Path(__file__).parents[3] / "docs" / "api.md"
PUBLIC_MODULES = (isotrain, isotrain.plugin)


def public_api() -> str:
    """Everything public, one thing a line."""
    lines = []
    for module in PUBLIC_MODULES:
        for name in module.__all__:
            lines += described(f"{module.__name__}.{name}", getattr(module, name))
    for hook in plugin.HOOKS:
        lines += described(hook, getattr(hookspecs, hook))
    return "\n".join(lines) + "\n"


def described(name: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        for member in sorted(getattr(value, "__all__", None) or own_names(value)):
            yield from described(f"{name}.{member}", getattr(value, member))
    elif inspect.isclass(value):
        yield f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
        for member in members(value):
            yield f"    {member}"
    elif inspect.isfunction(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def own_names(module: Any) -> list[str]:
    """What a module without `__all__` defines itself: functions, classes and constants."""
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__]
    return [name for name in {*own, *constants(module)} if not name.startswith("_")]


def constants(module: Any) -> Iterator[str]:
    """Names that a module gives a value to, in capitals."""
    for node in ast.parse(inspect.getsource(module)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (each.id for each in targets if isinstance(each, ast.Name) and each.id.isupper())


def signature(value: Any) -> str:
    """Signature as declared; default objects are shown by type, without addresses."""
    found = inspect.signature(value)
    shown = [
        p.replace(default=p.default)
        if isinstance(p.default, str | int | float | tuple | type(None) | type(inspect._empty))
        else p.replace(default=type(p.default).__name__)
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=shown))


def members(kind: type) -> Iterator[str]:
    """A class's public fields and methods, inherited ones of isotrain too."""
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if not cls.__module__.startswith("isotrain."):
            continue
        for name, annotation in vars(cls).get("__annotations__", {}).items():
            found[name] = f"{name}: {annotation}"
        for name, value in dict(vars(cls)).items():
            value = getattr(value, "__func__", value)
            if isinstance(value, property):
                found[name] = f"{name}: property"
            elif inspect.isfunction(value) and (not name.startswith("_") or name == "__init__"):
                found[name] = f"{name}{signature(value)}"
    yield from (line for name, line in sorted(found.items()) if public(name))


def public(name: str) -> bool:
    return name == "__init__" or not name.startswith(("_", "model_"))


@pytest.mark.slow
def test_the_public_api_is_as_recorded() -> None:
    """It runs in a process of its own: some names import a framework, which changes variables."""
    program = "from unit.repository.test_public_api import public_api; print(public_api(), end='')"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout == LISTED.read_text(encoding="utf-8"), __doc__


def test_every_public_name_is_documented() -> None:
    page = PAGE.read_text(encoding="utf-8")
    missing = [
        name for module in PUBLIC_MODULES for name in module.__all__ if f"`{name}`" not in page
    ]
    assert missing == []


def test_public_modules_are_importable_in_every_form() -> None:
    """Each module names everything that it defines."""
    modules = [name for name in isotrain.__all__ if inspect.ismodule(getattr(isotrain, name))]
    names = {
        "random": ["bernoulli", "dropout", "normal", "uniform"],
        "sources": sorted(core_sources.__all__),
    }
    assert modules == sorted(names)
    for name in modules:
        module = importlib.import_module(f"isotrain.{name}")
        assert module is getattr(isotrain, name)
        assert module.__all__ == names[name]
    program = (
        "from isotrain.sources import MapStyle, stream; import sys; print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("False\n", "")


def test_public_and_plugin_modules_export_the_same_objects() -> None:
    both = set(isotrain.__all__) & set(isotrain.plugin.__all__)
    assert "Strategy" in both
    assert {n for n in both if getattr(isotrain, n) is not getattr(isotrain.plugin, n)} == set()


if __name__ == "__main__":
    LISTED.write_text(public_api(), encoding="utf-8")
