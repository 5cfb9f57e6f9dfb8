"""The structure keeps its rules: what is packaged, who names a framework, what an import costs.

Who may import whom is a contract in pyproject.toml, which `make lint` checks.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import isotrain
import isotrain.plugin

ROOT = Path(__file__).parents[3]
FOLDERS = ("core", "adapters", "strategies", "environments", "launchers", "analysis", "testing")
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod", "jax"}
BACKEND_NAMES = r"\b(torch-ddp|tf-mirrored|tf-multiworker|horovod-(torch|tf))\b"


def modules(folder: str) -> Iterator[Path]:
    return (path for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module: many tests look at these."""
    return tuple(ast.walk(parsed(path)))


@functools.cache
def imported(path: Path) -> set[str]:
    """Dotted names that a module imports, anywhere in it."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_private_api_of_libraries_is_used_in_one_place_each() -> None:
    """Each of those places has checks of its own, which `doctor` runs.

    But for what only names a part, so that it is imported later: without that part, it does nothing.
    """
    names_only = ROOT / "adapters/keras/lazy_import.py"
    homes = {
        "keras.src": "adapters/keras/private",
        "tensorflow.python": "adapters/tensorflow/base/private_api.py",
        "horovod.runner": "adapters/horovod/private_api.py",
        "torch.fx.experimental": "adapters/torch/base/private_api.py",
        r"torch\._(inductor|guards|subclasses)": "adapters/torch/base/private_api.py",
        r"torch\._(foreach|fused)\w*": "adapters/torch/base/private_api.py",
        r"import _[A-Z]\w*": "adapters/torch/base/private_api.py",
    }
    for path in modules("adapters"):
        for private, home in homes.items():
            used = any(re.match(private, name) for name in imported(path))
            named = re.search(rf"\b{private}\b", path.read_text(encoding="utf-8"))
            at_home = path == names_only or path.is_relative_to(ROOT / home)
            assert at_home or not (used or named), f"{path}: {private}"


GPU_CALLS = {
    "torch": re.compile(r"torch\.(cuda|accelerator)\b|import .*\bcuda\b|\.is_cuda\b|\"cuda\""),
    "tensorflow": re.compile(r"(physical|logical)_devices\(\"GPU|visible_devices\("),
}


@pytest.mark.parametrize("framework", GPU_CALLS)
def test_gpus_of_a_framework_are_called_in_one_module(framework: str) -> None:
    """Tests put a recorder in its place, which would miss any other call."""
    callers = {
        path.relative_to(ROOT)
        for path in modules("adapters")
        if GPU_CALLS[framework].search(path.read_text(encoding="utf-8"))
    }
    assert callers == {Path("adapters", framework, "base", "gpu.py")}


def test_example_plugins_import_isotrain_plugin_alone() -> None:
    """Authors copy them, so what they import of isotrain is public."""
    public = r"isotrain(\.(plugin|testing)\b.*)?$"
    for folder in sorted((ROOT / "examples").glob("plugin_*")):
        for path in modules(f"examples/{folder.name}"):
            names = {name for name in imported(path) if re.match(r"isotrain(\.|$)", name)}
            behind = {name for name in names if not re.match(public, name)} - exported()
            assert not behind, f"{path}: {behind}"
        page = (folder / "README.md").read_text(encoding="utf-8")
        assert not re.search(r"isotrain\.(core|adapters)\b", page), folder


def exported() -> set[str]:
    """What `isotrain` itself exports, by name."""
    return {f"isotrain.{name}" for name in isotrain.__all__}


PRIVATE_HOMES = {"private_api.py", "private"}
ASKING = {"getattr", "hasattr", "setattr", "delattr"}
PUBLIC_ALL_THE_SAME = {
    *(
        "_replace",
        "_fields",
        "_asdict",
        "_make",
    ),  # of named tuples, whose fields may have any other name
    "_exit",  # of os
    "_SubParsersAction",  # of argparse: the only name of what add_subparsers gives
    "_repr_html_",  # what notebooks call
    "_empty",  # of inspect
}
PRIVATE_ALL_THE_SAME = {
    "adapters/torch/program_hooks.py": {
        "_compression",
        "_fsdp_flattened",
    },  # nothing public tells how Horovod compresses, and that FSDP1 has a parameter
    "benchmarks/peers/programs/torch_ddp.py": {"_foreach_lerp_"},  # as people write fast averages
    "core/data/streaming/sample_streams.py": {"_ex_iterable"},  # what tells of a shuffle buffer
    "core/system/process.py": {"_run_exitfuncs"},  # of atexit: without it no run would end
    "tests/conformance/run_handwritten.py": {
        "_httpd"
    },  # of Horovod's rendezvous, whose stop leaves it open
    "tests/integration/horovod_runs.py": {
        "_all_reduce_in_groups",
        "_communicator",
    },  # nothing public tells how gradients are grouped
    "tests/integration/external_launch_program.py": {"_sigsegv"},  # of faulthandler: made for tests
    "tests/unit/adapters/test_torch_gpu.py": {
        "_device_count_nvml"
    },  # builds of torch for CPUs count GPUs by nothing public
    "tools/site/pages.py": {"_actions"},  # of argparse: nothing public lists a parser's arguments
}


def private_attributes(path: Path) -> Iterator[str]:
    """Names beginning with `_` that a module asks of others: not of `self`, nor of its own classes."""
    own = set(defined(path))
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            of_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if of_itself else [node.attr]
        elif isinstance(node, ast.Call):
            asked = any(named_by(each) in ASKING for each in (node.func, *node.args))
            names = [each.value for each in node.args if isinstance(each, ast.Constant)] * asked
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("isotrain"):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if re.match(r"_[A-Za-z]", str(name)) and name not in own)


def named_by(node: ast.expr) -> str | None:
    """The last name of a name with dots, or without."""
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)


def defined(path: Path) -> Iterator[str]:
    """Names of functions, classes and attributes that a module makes."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


@pytest.mark.parametrize(
    "folder",
    [
        *FOLDERS,
        *("examples", "tools"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("tests", "benchmarks")),
    ],
)
def test_private_attributes_of_other_modules_are_not_used(folder: str) -> None:
    """Those of libraries are used in modules with checks of their own."""
    for path in modules(folder):
        if not {path.name, path.parent.name} & PRIVATE_HOMES:
            known = PRIVATE_ALL_THE_SAME.get(str(path.relative_to(ROOT)), set())
            found = set(private_attributes(path)) - PUBLIC_ALL_THE_SAME - known
            assert not found, f"{path}: {found}"


def test_the_search_finds_private_attributes(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "class Mine:\n"
        "    _noted: int\n"
        "    def ask(self, other, functools):\n"
        "        self._kept = other._noted, other._kept, other.__dict__, getattr(other, 'shape')\n"
        "        other._one, getattr(other, '_two', None), functools.partial(getattr, other, '_three')\n"
        "        from isotrain.core import _four, four\n"
        "        monkeypatch.setattr(other, '_five', 5)\n"
    )
    assert set(private_attributes(module)) == {"_one", "_two", "_three", "_four", "_five"}


@pytest.mark.parametrize("folder", ["strategies", "environments", "launchers"])
def test_exports_for_adapters_are_used_by_adapters_alone(folder: str) -> None:
    stub = ast.parse((ROOT / "isotrain/plugin.pyi").read_text(encoding="utf-8"))
    of_adapters = {
        f"isotrain.plugin.{(alias.asname or alias.name).lstrip('_')}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("isotrain.adapters.")
        for alias in node.names
    }
    assert "isotrain.plugin.keras_private" in of_adapters
    for path in modules(folder):
        assert not imported(path) & of_adapters, path


@pytest.mark.parametrize(
    "folder", ["core", "strategies", "environments", "launchers", "analysis", "isotrain"]
)
def test_only_adapters_import_frameworks(folder: str) -> None:
    for path in modules(folder):
        frameworks = {name.split(".")[0] for name in imported(path)} & FRAMEWORKS
        assert not frameworks, f"{path} imports {frameworks}"


def test_the_conformance_kit_is_neutral() -> None:
    """Its portable models import Keras inside of functions; only its pytest module imports pytest."""
    names = re.compile(BACKEND_NAMES)
    for path in modules("testing"):
        if path.name in ("gpu_report.py", "gpu_speed.py"):
            # beside the kit: they compare with loops in torch alone
            continue
        found = imported(path)
        frameworks = {name.split(".")[0] for name in found} & (FRAMEWORKS - {"keras"})
        assert not frameworks, f"{path} imports {frameworks}"
        assert path.name == "pytest_suite.py" or not {
            n for n in found if n.split(".")[0] == "pytest"
        }
        for text in string_constants(path):
            assert not names.search(text), f"{path}: {text!r}"


def string_constants(path: Path) -> Iterator[str]:
    """Every string in a module but its docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes(path):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node.value


def test_core_names_no_backend() -> None:
    """Examples of the command line name those that are registered."""
    names = re.compile(BACKEND_NAMES)
    for path in modules("core"):
        for text in string_constants(path):
            assert not names.search(text), f"{path}: {text!r}"


def core_packages() -> list[set[str]]:
    """Packages of core, from the top down; those of one layer are in one set."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    found = next(each for each in contracts if each.get("containers") == ["isotrain.core"])
    return [set(layer.split(" | ")) for layer in found["layers"]]


NAMED = re.compile(
    r"\b(isotrain\.(?:core|adapters|strategies|environments|launchers|analysis|testing)(?:\.\w+)+)"
    r"(?:(?::| import )(\w+))?"
)
"""A module, and perhaps something in it."""
NAMED_FROM_BELOW = {
    "core/cli/commands/compare.py": {"isotrain.analysis.commands"},
    "core/cli/commands/diagnose.py": {
        "isotrain.analysis.commands",
        "isotrain.analysis.program_trace.commands",
    },
    "core/cli/commands/find.py": {"isotrain.analysis.find.commands"},
    "core/cli/commands/plugins.py": {"isotrain.testing.commands"},
    "core/cli/internal_work.py": {
        "isotrain.analysis.compare.measurement.measure",
        "isotrain.analysis.parity.bit_trace",
        "isotrain.analysis.parity.trace",
        "isotrain.analysis.program_trace.spec_run",
    },
    "core/launching/forkserver/process_handle.py": {"isotrain.core.worker.worker"},
    "core/launching/scheduler/scheduler_run.py": {"isotrain.core.worker.entry_points"},
    "core/launching/forkserver/server.py": {
        *("isotrain.core.session.session", "isotrain.core.worker.worker"),
        "isotrain.core.worker.entry_points",
    },
    "core/plugins/builtin.py": {
        *(f"isotrain.core.loggers.{n}" for n in ("csv", "jsonl", "mlflow", "tensorboard", "wandb")),
        "isotrain.core.launching.local_launcher",
    },
    "core/plugins/manager.py": {
        *(f"isotrain.{n}.builtin" for n in ("adapters", "environments", "launchers", "strategies")),
        "isotrain.testing.builtin",
    },
}
"""What is imported by its name alone by modules that may not import it: who starts a process of a run names
what it does, and plugins come in by their names. The linter sees none of these."""


def named(path: Path) -> Iterator[tuple[str, str]]:
    """Modules of isotrain that a module names in strings, and what it says is in them; or nothing."""
    for text in string_constants(path):
        yield from NAMED.findall(text)


def test_modules_named_in_strings_exist() -> None:
    for path in modules("core"):
        for module, inside in named(path):
            where = ROOT.joinpath(*module.split(".")[1:])
            where = where / "__init__.py" if where.is_dir() else where.with_suffix(".py")
            assert where.is_file(), f"{path}: {module}"
            known = set(defined(where))
            assert not inside or inside in known, f"{path}: {module}:{inside}"


def test_strings_that_name_a_module_above_are_listed() -> None:
    levels = {package: level for level, layer in enumerate(core_packages()) for package in layer}
    found: dict[str, set[str]] = {}
    for path in modules("core"):
        own = path.relative_to(ROOT / "core").with_suffix("").parts[0]
        for module, _ in named(path):
            of_core, package = module.split(".")[1] == "core", module.split(".")[2]
            if not of_core or (levels[package] <= levels[own] and package != own):
                found.setdefault(str(path.relative_to(ROOT)), set()).add(module)
    assert found == NAMED_FROM_BELOW


def test_contributing_lists_every_package_in_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = text.partition("The packages of `core`")[2].split("```")[1].strip().splitlines()
    assert [set(re.split(", ", re.split(r"\s{2,}", line)[0])) for line in drawn] == core_packages()


def test_the_bounds_of_frameworks_are_the_tested_versions() -> None:
    """The newest are those of constraints.txt, and the oldest those of `make test-oldest`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pinned = dict(re.findall(r"(?m)^([a-z]+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text()))
    makefile = (ROOT / "Makefile").read_text()
    oldest = dict(re.findall(r"'(tensorflow|keras)(?:-cpu)?==(\d+\.\d+)\.0'", makefile))
    page = (ROOT / "docs" / "install.md").read_text()
    bounds = re.findall(r"(torch|tensorflow|keras)>=([\d.]+),<(\d+)\.(\d+)", str(extras))
    assert {name for name, *_ in bounds} == {"torch", "tensorflow", "keras"}
    for name, lower, major, minor in bounds:
        newest = f"{major}.{int(minor) - 1}"
        assert newest == pinned[name]
        assert lower == oldest.get(name, lower)
        assert f"| {name} | {lower} to {newest} |" in page.lower()


def test_every_package_is_in_the_wheel() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
            "packages"
        ]
    )
    folders = {"isotrain", "isotrain.build_horovod"}
    for top in FOLDERS:
        for init in (ROOT / top).rglob("__init__.py"):
            folders.add(".".join(["isotrain", *init.parent.relative_to(ROOT).parts]))
    assert listed == folders


@pytest.mark.parametrize("statement", ["import isotrain", "import isotrain.core.cli.main"])
def test_importing_loads_no_framework(statement: str) -> None:
    program = f"{statement}; import sys; print(*sys.modules, sep='\\n')"
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in finished.stdout.split()}
    assert not loaded & (FRAMEWORKS | {"pydantic", "rich", "fsspec", "safetensors"})


@pytest.mark.parametrize("module", [isotrain, isotrain.plugin])
def test_a_public_module_has_exactly_its_names(module: ModuleType) -> None:
    assert {name for name in dir(module) if not name.startswith("__")} == {*module.__all__}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


@pytest.mark.parametrize("folder", [*FOLDERS, "examples", "benchmarks", "tools"])
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    for path in modules(folder):
        for node in nodes(path):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node) or ""
                if docstring.partition("\n")[0].endswith("?"):
                    continue  # an example that answers a question
                fragment = re.match(r"(Of|Whose|Which|What|By|Those|That|Why|How)\b.*", docstring)
                assert not fragment, f"{path}: {fragment}"


def test_collecting_the_tests_imports_no_tensorflow(collection_imports: set[str]) -> None:
    """Each test process collects all test files: what they import takes its seconds in each."""
    assert not collection_imports, "import it in `isolated.run_isolated`"
