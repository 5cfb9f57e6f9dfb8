"""Import strings: "package.module:name" or "path/to/file.py:name"; most functions also accept objects."""

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
from isotrain.core.system.interpreter_start import FILE_MODULE
from isotrain.core.system.process import gc_paused

SYNTAX = '"package.module:name" or "path/to/file.py:name"'
_IMPORT_LOCK = threading.RLock()


def is_bare_name(value: Any) -> bool:
    """Whether a value is a plain name, such as a Keras name, rather than an import string or an object."""
    return isinstance(value, str) and ":" not in value


def resolve(reference: Any) -> Any:
    """Imports the object that an import string names; other objects are returned unchanged.

    Raises:
        SpecError: The syntax is wrong, the module, file or name does not exist, or the import failed.
    """
    if not isinstance(reference, str):
        return reference
    module, names = _split(reference)
    value: Any = load_module(module)
    for name in names.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise SpecError(
                f"reference {reference!r}: {module!r} has no {name!r}.{did_you_mean(name, dir(value))}"
            ) from None
    return value


def load_module(module: str) -> ModuleType:
    """Imports a module by its dotted name, or by the path of its `.py` file.

    Raises:
        SpecError: The module does not exist, or the import failed.
    """
    return _import_file(Path(module)) if module.endswith(".py") else _import_module(module)


def module_problem(module: str) -> str | None:
    """Reason why `load_module` would not find a module, or None; imports nothing."""
    if module.endswith(".py"):
        return _missing_file(Path(module))
    if not all(part.isidentifier() for part in module.split(".")):
        return f"{module!r} is neither a dotted module name nor a file that ends in .py"
    exists = module in sys.modules or _find_module(module) is not None or _makes_modules(module)
    return None if exists else _missing_module(module)


def describe(reference: Any) -> str:
    """Description of an object in one line, equal in all processes.

    A callable with a name becomes "module:qualname" (or "file.py:qualname" if it was imported from a
    file), any other object the name of its type.
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
    """Whether a fresh process can import this very object by its module and qualified name."""
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
    """Whether an import string names a Python file rather than a module."""
    return reference.rpartition(":")[0].endswith(".py")


def may_be_same(one: Any, other: Any) -> bool:
    """Whether two import strings may name the same function: same name, and module or file of one name."""
    if not all(isinstance(each, str) and ":" in each for each in (one, other)):
        return False
    (module, _, name), (other_module, _, other_name) = one.rpartition(":"), other.rpartition(":")
    modules = {_last_name(module), _last_name(other_module)} - {"__main__"}
    return name == other_name and len(modules) <= 1


def _last_name(module: str) -> str:
    """Last part of a module's dotted name, or the stem of its file."""
    return Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]


def absolute(reference: str, folder: Path) -> str:
    """Import string with the path of its file, if any, made absolute relative to `folder`."""
    if not is_file(reference):
        return reference
    module, names = _split(reference)
    return f"{absolute_module(module, folder)}:{names}"


def absolute_module(module: str, folder: Path) -> str:
    """Path of a `.py` file made absolute relative to `folder`; dotted names unchanged."""
    return str((folder / Path(module).expanduser()).resolve()) if module.endswith(".py") else module


def syntax_problem(reference: str) -> str | None:
    """Reason why a text is not an import string, or None."""
    try:
        _split(reference)
    except SpecError as error:
        return str(error)
    return None


def problem(reference: str) -> str | None:
    """Reason why an import string cannot be resolved, or None; imports nothing.

    The module is searched for without importing its parents, and the name in the parsed source. Where that
    cannot decide (compiled modules, star imports, names made at run time), the answer is None.
    """
    syntax = syntax_problem(reference)
    if syntax is not None:
        return syntax
    module, names = _split(reference)
    name = names.split(".")[0]
    if is_file(reference):
        return _file_problem(Path(module), name)
    return _module_problem(module, name)


def _split(reference: str) -> tuple[str, str]:
    module, colon, names = reference.rpartition(":")
    if not colon or not module or not all(part.isidentifier() for part in names.split(".")):
        raise SpecError(f"reference {reference!r} is not of the form {SYNTAX}")
    if not module.endswith(".py") and not all(part.isidentifier() for part in module.split(".")):
        raise SpecError(f"reference {reference!r} is not of the form {SYNTAX}")
    return module, names


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
    return f"{FILE_MODULE}{digest}_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"


def _public_module(name: str) -> str:
    if name.startswith(FILE_MODULE):
        stem = name.removeprefix(FILE_MODULE).partition("_")[2]
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


def _module_problem(module: str, name: str) -> str | None:
    if module in sys.modules:
        return _loaded_problem(sys.modules[module], module, name)
    spec = _find_module(module)
    if spec is None:
        return None if _makes_modules(module) else _missing_module(module)
    locations = spec.submodule_search_locations
    if locations is not None and name in _submodules(locations):
        return None
    if not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        return None
    return _source_problem(Path(spec.loader.path), f"module {module!r}", name)


def _makes_modules(name: str) -> bool:
    """Whether a parent package may add submodules or search paths when it is imported."""
    for end in range(1, name.count(".") + 1):
        spec = _find_module(name.rsplit(".", end)[0])
        if spec is not None:
            source = Path(spec.origin or "")
            text = source.read_bytes() if source.suffix == ".py" else b""
            return b"__path__" in text or b"sys.modules" in text
    return False


def _loaded_problem(module: ModuleType, module_name: str, name: str) -> str | None:
    attributes = vars(module)
    if name in attributes or "__getattr__" in attributes:
        return None
    if module_name == "__main__":
        return (
            f"the script that runs now has no {name!r}. Name the file that has it, as"
            f" path/to/script.py:{name}, or pass the spec that was run: spec=..., or --spec on the"
            " command line."
        )
    return f"module {module_name!r} has no {name!r}.{did_you_mean(name, attributes)}"


def _file_problem(path: Path, name: str) -> str | None:
    return _missing_file(path) or _source_problem(path, f"file {str(path)!r}", name)


def _missing_file(path: Path) -> str | None:
    if path.is_file():
        return None
    siblings = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
    return f"there is no file {str(path)!r}.{did_you_mean(path.name, siblings)}"


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
    """Message with the missing part of a dotted name and the most similar existing name."""
    parts = name.split(".")
    locations: Sequence[str] | None = None
    for end in range(1, len(parts) + 1):
        spec = _find_module(".".join(parts[:end]))
        if spec is None:
            inside = f" in {'.'.join(parts[: end - 1])!r}" if end > 1 else ""
            hint = did_you_mean(parts[end - 1], _submodules(locations))
            return f"there is no module {parts[end - 1]!r}{inside}.{hint}"
        locations = spec.submodule_search_locations or []
    return f"there is no module {name!r}."


def _submodules(locations: Iterable[str] | None) -> set[str]:
    folders = None if locations is None else list(locations)
    return {module.name for module in pkgutil.iter_modules(folders)}


def _find_module(name: str, loaded: bool = True) -> importlib.machinery.ModuleSpec | None:
    """Finds a module's spec as the import system would, without importing its parent packages."""
    path: Sequence[str] | None = None
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find_spec(".".join(parts[:end]), path, loaded)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _find_spec(
    name: str, path: Sequence[str] | None, loaded: bool
) -> importlib.machinery.ModuleSpec | None:
    loaded_spec = getattr(sys.modules.get(name), "__spec__", None) if loaded else None
    if isinstance(loaded_spec, importlib.machinery.ModuleSpec):
        return loaded_spec
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _bound_names(tree: ast.Module) -> set[str] | None:
    """Names that a module binds at its top level, or None if only running it could tell."""
    names: set[str] = set()
    for node in _nodes_in_scope(tree):
        if isinstance(node, ast.Name) and node.id in {"globals", "exec", "vars", "setattr"}:
            return None
        names.update(_bindings(node))
    return None if names & {"*", "__getattr__"} else names


def _nodes_in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below a node in the same scope, without the bodies of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            yield from _nodes_in_scope(child)


def _bindings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
