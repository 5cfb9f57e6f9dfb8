"""Import references: "package.module:name", "path/to/file.py:name", or the object itself."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import pkgutil
import re
import sys
import threading
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from isotrain.core.errors import SpecError, did_you_mean
from isotrain.core.system.process import gc_paused

SYNTAX = '"package.module:name" or "path/to/file.py:name"'
_FILE_MODULE = "isotrain_file_"
_IMPORT_LOCK = threading.RLock()


def is_bare_name(value: Any) -> bool:
    """Whether a value is a name that something is known by, and no reference to import."""
    return isinstance(value, str) and ":" not in value


def resolve(reference: Any) -> Any:
    """Imports what a reference names.

    Args:
        reference: A reference string, or the object itself, which is returned unchanged.

    Returns:
        The object that the reference names.

    Raises:
        SpecError: The syntax, the module, the file or the name is wrong, or the import failed.
    """
    if not isinstance(reference, str):
        return reference
    where, names = _split(reference)
    found: Any = load_module(where)
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise SpecError(
                f"reference {reference!r}: {where!r} has no {name!r}.{did_you_mean(name, dir(found))}"
            ) from None
    return found


def load_module(where: str) -> ModuleType:
    """Imports a module by its dotted name, or by the path of its file when that ends in `.py`.

    Raises:
        SpecError: There is none, or the import failed.
    """
    return _import_file(Path(where)) if where.endswith(".py") else _import_module(where)


def module_problem(where: str) -> str | None:
    """Says why `load_module` would not find anything, or None; it looks, and imports nothing."""
    if where.endswith(".py"):
        return _missing_file(Path(where))
    if not all(part.isidentifier() for part in where.split(".")):
        return f"{where!r} is neither a dotted module name nor a file that ends in .py"
    found = where in sys.modules or _find_module(where) is not None or _makes_modules(where)
    return None if found else _missing_module(where)


def describe(reference: Any) -> str:
    """Names an object in one line that does not change from process to process.

    A callable that has a name becomes "module:qualname" (or "file.py:qualname" when it was
    imported from a file reference), anything else the name of its type.
    """
    if isinstance(reference, str):
        return reference
    if isinstance(reference, functools.partial):
        return f"<partial of {describe(reference.func)}>"
    name = getattr(reference, "__qualname__", None)
    module = getattr(reference, "__module__", None)
    if isinstance(name, str) and isinstance(module, str):
        return f"{_public_module(module)}:{name}"
    return _describe_object(reference)


def is_importable(reference: Any) -> bool:
    """Whether a fresh process finds this very object again by module and qualified name."""
    name = getattr(reference, "__qualname__", None)
    module = getattr(reference, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str):
        return False
    if module == "__main__" or "<" in name or _find_module(module, loaded=False) is None:
        return False
    try:
        return resolve(f"{module}:{name}") is reference
    except SpecError:
        return False


def is_file(reference: str) -> bool:
    """Whether a reference string names a Python file rather than a module."""
    return reference.rpartition(":")[0].endswith(".py")


def may_be_one(one: Any, other: Any) -> bool:
    """Whether two references may be of one function: of files or modules named alike, or of the script."""
    if not all(isinstance(each, str) and ":" in each for each in (one, other)):
        return False
    (where, _, name), (other_where, _, other_name) = one.rpartition(":"), other.rpartition(":")
    modules = {_own_name(where), _own_name(other_where)} - {"__main__"}
    return name == other_name and len(modules) <= 1


def _own_name(where: str) -> str:
    """What a module or the file of one is called, wherever it lies."""
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2]


def absolute(reference: str, folder: Path) -> str:
    """Makes the path of a file reference absolute, relative to `folder`; leaves others alone."""
    if not is_file(reference):
        return reference
    where, names = _split(reference)
    return f"{absolute_module(where, folder)}:{names}"


def absolute_module(where: str, folder: Path) -> str:
    """Makes the path of a file absolute, relative to `folder`; leaves dotted names alone."""
    return str((folder / Path(where).expanduser()).resolve()) if where.endswith(".py") else where


def syntax_problem(reference: str) -> str | None:
    """Says what is wrong with the form of a reference string, or None."""
    try:
        _split(reference)
    except SpecError as error:
        return str(error)
    return None


def problem(reference: str) -> str | None:
    """Says why a reference cannot be imported, or None; it looks, and imports nothing.

    The module is searched for without importing its parents, and the name is searched for in the
    parsed source. What cannot be decided that way (compiled modules, star imports, modules that
    make their names at run time) counts as right.
    """
    form = syntax_problem(reference)
    if form is not None:
        return form
    where, names = _split(reference)
    name = names.split(".")[0]
    if is_file(reference):
        return _file_problem(Path(where), name)
    return _module_problem(where, name)


def _split(reference: str) -> tuple[str, str]:
    where, colon, names = reference.rpartition(":")
    if not colon or not where or not all(part.isidentifier() for part in names.split(".")):
        raise SpecError(f"reference {reference!r} is not of the form {SYNTAX}")
    if not where.endswith(".py") and not all(part.isidentifier() for part in where.split(".")):
        raise SpecError(f"reference {reference!r} is not of the form {SYNTAX}")
    return where, names


def _import_module(name: str) -> ModuleType:
    try:
        with gc_paused():  # it may import a framework
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise SpecError(_missing_module(name)) from None
        raise SpecError(_import_failed(f"module {name!r}", error)) from error
    except Exception as error:
        raise SpecError(_import_failed(f"module {name!r}", error)) from error


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    missing = _missing_file(path)
    if missing is not None:
        raise SpecError(missing)
    name = _file_module_name(path)
    with _IMPORT_LOCK:
        if name not in sys.modules:
            _execute_file(name, path)
        return sys.modules[name]


def _execute_file(name: str, path: Path) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with gc_paused():
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise SpecError(_import_failed(f"file {str(path)!r}", error)) from error


def _file_module_name(path: Path) -> str:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    return f"{_FILE_MODULE}{digest}_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"


def _public_module(name: str) -> str:
    if name.startswith(_FILE_MODULE):
        stem = name.removeprefix(_FILE_MODULE).partition("_")[2]
        return str(getattr(sys.modules.get(name), "__file__", None) or f"{stem}.py")
    return name


def _describe_object(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"<{kind} {dtype} {'x'.join(map(str, shape)) or 'scalar'}>"
    return f"<{kind}>"


def _import_failed(what: str, error: BaseException) -> str:
    return f"importing {what} failed: {type(error).__name__}: {error}"


def _module_problem(where: str, name: str) -> str | None:
    if where in sys.modules:
        return _loaded_problem(sys.modules[where], where, name)
    spec = _find_module(where)
    if spec is None:
        return None if _makes_modules(where) else _missing_module(where)
    locations = spec.submodule_search_locations
    if locations is not None and name in _submodules(locations):
        return None
    if not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return None
    return _source_problem(Path(spec.loader.path), f"module {where!r}", name)


def _makes_modules(name: str) -> bool:
    """Whether a parent package may add modules or folders to itself when it runs."""
    for end in range(1, name.count(".") + 1):
        spec = _find_module(name.rsplit(".", end)[0])
        if spec is not None:
            source = Path(spec.origin or "")
            text = source.read_bytes() if source.suffix == ".py" else b""
            return b"__path__" in text or b"sys.modules" in text
    return False


def _loaded_problem(module: ModuleType, where: str, name: str) -> str | None:
    known = vars(module)
    if name in known or "__getattr__" in known:
        return None
    if where == "__main__":
        return (
            f"the script that runs now has no {name!r}. Name the file that has it, as"
            f" path/to/script.py:{name}, or pass the spec that was run: spec=..., or --spec on the"
            " command line."
        )
    return f"module {where!r} has no {name!r}.{did_you_mean(name, known)}"


def _file_problem(path: Path, name: str) -> str | None:
    return _missing_file(path) or _source_problem(path, f"file {str(path)!r}", name)


def _missing_file(path: Path) -> str | None:
    if path.is_file():
        return None
    beside = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
    return f"there is no file {str(path)!r}.{did_you_mean(path.name, beside)}"


def _source_problem(path: Path, what: str, name: str) -> str | None:
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read(), str(path))
    except SyntaxError as error:
        return f"{what} has a syntax error in line {error.lineno}: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{what} cannot be read: {error}"
    bound = _bound_names(tree)
    if bound is None or name in bound:
        return None
    return f"{what} has no {name!r}.{did_you_mean(name, bound)}"


def _missing_module(name: str) -> str:
    """Says which part of a dotted name is missing, and the nearest name beside it."""
    parts = name.split(".")
    known: Sequence[str] | None = None
    for end in range(1, len(parts) + 1):
        spec = _find_module(".".join(parts[:end]))
        if spec is None:
            inside = f" in {'.'.join(parts[: end - 1])!r}" if end > 1 else ""
            hint = did_you_mean(parts[end - 1], _submodules(known))
            return f"there is no module {parts[end - 1]!r}{inside}.{hint}"
        known = spec.submodule_search_locations or []
    return f"there is no module {name!r}."


def _submodules(locations: Iterable[str] | None) -> set[str]:
    folders = None if locations is None else list(locations)
    return {module.name for module in pkgutil.iter_modules(folders)}


def _find_module(name: str, loaded: bool = True) -> importlib.machinery.ModuleSpec | None:
    """Finds a module as the import system would, without importing its parent packages.

    Args:
        name: The dotted name.
        loaded: Whether the specification of a module that is already imported counts.
    """
    path: Sequence[str] | None = None
    found = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        found = _find_one(".".join(parts[:end]), path, loaded)
        if found is None:
            return None
        path = list(found.submodule_search_locations or [])
    return found


def _find_one(
    name: str, path: Sequence[str] | None, loaded: bool
) -> importlib.machinery.ModuleSpec | None:
    known = getattr(sys.modules.get(name), "__spec__", None) if loaded else None
    if isinstance(known, importlib.machinery.ModuleSpec):
        return known
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _bound_names(tree: ast.Module) -> set[str] | None:
    """The names a module binds at its top level, or None when only running it could tell."""
    names: set[str] = set()
    for node in _own_nodes(tree):
        if isinstance(node, ast.Name) and node.id in {"globals", "exec", "vars", "setattr"}:
            return None
        names.update(_bindings(node))
    return None if names & {"*", "__getattr__"} else names


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node` that runs in its scope: not the bodies of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            yield from _own_nodes(child)


def _bindings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
