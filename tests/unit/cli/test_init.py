"""`isotrain init`, and the backend of runs that name none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.in_process import command as in_process

from isotrain.core.cli.commands import init
from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.contracts.backend.capabilities import Availability
from isotrain.core.errors import BackendUnavailableError
from isotrain.core.planning.backend_choice import resolve_backend
from isotrain.core.plugins.manager import PluginManager, plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.loading import load_spec

FILES = ["data.py", "model.py", "train.yaml"]


def written(folder: Path) -> dict[str, Any]:
    done = in_process("init", "spirals", "--json", folder=folder)
    assert done.returncode == ExitCode.OK, done.stderr
    printed = json.loads(done.stdout)
    assert sorted(path.name for path in (folder / "spirals").iterdir()) == FILES
    assert sorted(Path(path).name for path in printed["files"]) == FILES
    return dict(printed)


def trained(folder: Path, *arguments: str) -> str:
    run = ("run", "train.yaml", "--replicas", "2", *arguments)
    done = in_process(*run, folder=folder / "spirals")
    assert done.returncode == ExitCode.OK, done.stderr
    facts = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines() if "accuracy" in line)
    assert float(facts["validation accuracy"]) > 0.9
    return done.stderr


def test_without_a_framework_it_trains_in_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init, "model_kind", lambda host: "numpy")
    assert written(tmp_path)["model"] == "numpy"
    assert "spirals on numpy:tcp, 2 replicas\n" in trained(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["portable", "torch"])
def test_it_trains_at_once_on_the_first_backend(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "portable":
        monkeypatch.setattr(init, "find_spec", lambda name: None)
    assert written(tmp_path)["model"] == kind
    first = plugin_manager().backends.names()[0]
    title = trained(tmp_path, "--set", "threads=1").splitlines()[0]
    assert title.startswith(f"spirals on {first}:")
    assert title.endswith("2 replicas (backend: the first that is available here)")


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("mine")
    done = in_process("init", folder=tmp_path)
    assert (done.returncode, "data.py exists already" in done.stderr) == (ExitCode.USAGE, True)
    assert [path.name for path in tmp_path.iterdir()] == ["data.py"]


class Absent(PluginManager):
    """No backend is installed but one."""

    def backend(self, name: str) -> Any:
        adapter = super().backend(name)
        missing = Availability(False, None, "it is not installed", "install it")
        if name != "numpy":
            adapter.availability = lambda: missing
        return adapter


def test_the_model_decides_which_backends_are_tried() -> None:
    spec = load_spec(
        {
            "model": "os:getcwd",
            "loss": "mean_squared_error",
            "optimizer": "adam",
            "global_batch_size": 1,
            "steps": 1,
        }
    )
    there, absent = PluginManager(entry_points=False), Absent(entry_points=False)
    names = there.backends.names()

    def resolved(requested: str | None, host: PluginManager, **changes: Any) -> str:
        return resolve_backend(requested, ResolvedSpec(spec.replace(**changes), host))

    assert resolved(None, there) == resolved("auto", there) == names[0]
    assert resolved("other:ring", there) == "other:ring"
    assert resolved(None, there, model={"tensorflow": "os:getcwd"}) == names[1]
    assert resolved(None, there, backend="numpy") == "numpy"
    assert resolved("auto", absent, backend="numpy") == "numpy"
    with pytest.raises(
        BackendUnavailableError, match=rf"{names[0]}: it is not installed \(install"
    ):
        resolved(None, absent)
    with pytest.raises(BackendUnavailableError, match="None is registered for its frameworks"):
        resolved(None, there, model={"mxnet": "os:getcwd"})
