"""What starts which backend, and the commands that say so."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from unit.environments.environment_cases import SRUN

from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import main
from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.job import PluginChoice
from isotrain.core.contracts.launcher import Allocation, HostSlots, Launcher, LauncherChoice
from isotrain.core.errors import UnsupportedError
from isotrain.core.launching.scheduler.scheduler_run import rank_command
from isotrain.core.planning import launcher_support
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.reporting import launcher_text
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.system import hardware

SPEC = {"loss": "mse", "optimizer": {"name": "sgd", "lr": 0.1}, "global_batch_size": 4, "steps": 1}


class External(Launcher):
    """Starts the same command on every rank."""

    name = "external"
    summary = "for tests"

    def __init__(self, slots: int = 2) -> None:
        self.slots = slots

    def allocation(self) -> Allocation:
        return Allocation((HostSlots(self.slots, "there", 4),))

    def refuses(self, adapter: Adapter, processes: int) -> str | None:
        return adapter.why_not_externally_started() if processes > 1 else None

    def launch(self, *_: Any, **__: Any) -> list[Any]:
        return []


@pytest.fixture
def host() -> PluginManager:
    host = PluginManager(entry_points=False)
    host.launchers.add(External)
    return host


def test_a_single_process_backend_is_refused_by_launchers(host: PluginManager) -> None:
    listed = {each["name"]: each["backends"] for each in launcher_support.launchers(host)}
    environments_by_name = {
        each["name"]: each["backends"] for each in launcher_support.environments(host)
    }
    assert list(environments_by_name) == host.environments.names()
    for name in host.backends.names():
        alone = host.backend(name).replicas_per_process == "all"
        assert listed["local"][name] == {"supported": True, "alone": True, "reason": None}
        for pairs in (listed["external"], *environments_by_name.values()):
            assert pairs[name]["supported"] is not alone
            assert pairs[name]["alone"]
            assert ("in one process" in str(pairs[name]["reason"])) is alone


def test_a_plan_refuses_what_a_launcher_refuses(host: PluginManager) -> None:
    adapters = [host.backend(name) for name in host.backends.names()]
    alone = next(each for each in adapters if each.replicas_per_process == "all")
    spec = TrainingSpec.model_validate({**SPEC, "model": "a:b", "data": "a:c"})
    plan = functools.partial(make_plan, ResolvedSpec(spec, host), backend=alone.name, replicas=2)
    assert len(plan(launcher=LauncherChoice("local")).processes) == 1
    with pytest.raises(UnsupportedError, match=f"'external' does not start backend '{alone.name}'"):
        plan(launcher=LauncherChoice("external"))


def test_one_external_process_may_have_all_replicas(host: PluginManager) -> None:
    adapters = [host.backend(name) for name in host.backends.names()]
    alone = next(each for each in adapters if each.replicas_per_process == "all")
    spec = TrainingSpec.model_validate({**SPEC, "model": "a:b", "data": "a:c"})
    for asked, device, found in ((3, "cpu", 3), (None, "cpu", 1), (None, "auto", 4)):
        plan = make_plan(
            ResolvedSpec(spec.replace(device=device), host),
            backend=alone.name,
            replicas=asked,
            launcher=LauncherChoice("external", {"slots": 1}),
        )
        ((replicas, where),) = ((each.replicas, each.host) for each in plan.processes)
        assert (replicas, where) == (tuple(range(found)), "there")
        assert plan.threads == max(1, hardware.cores() // found)
        options = rank_command(spec, plan, PluginChoice(), Path("run"), None).options
        assert options[options.index("--replicas") + 1] == str(found)


def test_a_broken_launcher_hides_no_other(host: PluginManager) -> None:
    host.backends.add("no_such_module:Adapter", name="gone")
    host.launchers.add("no_such_module:Launcher", name="gone")
    host.environments.add("no_such_module:ClusterEnvironment", name="gone")
    launchers, environments = launcher_support.launchers(host), launcher_support.environments(host)
    for each in (
        launchers[-1],
        environments[-1],
        {"backends": {"x": launchers[0]["backends"]["gone"]}},
    ):
        assert all("cannot be loaded" in pair["reason"] for pair in each["backends"].values())
    text = launcher_text.launchers(launchers, environments)
    assert "no_such_module" in text
    assert "| local " in text


def test_commands_list_launchers_and_environments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.environ", {**SRUN})
    assert main(["cluster-info", "--json"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    found = told["cluster_info"]
    assert told["tls"] == {"folder": None, "problem": None, "until": None}
    assert (found["environment"], found["rank"], found["hosts"]) == (
        "slurm",
        4,
        ["n02", "n03", "n04"],
    )
    assert main(["cluster-info"]) == ExitCode.OK
    assert "all hosts         n02, n03, n04\n" in capsys.readouterr().out
    monkeypatch.setattr("os.environ", {})
    assert main(["cluster-info"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("No scheduler or launcher started this process")
    monkeypatch.setattr("os.environ", {"PMI_RANK": "0"})
    assert main(["cluster-info"]) == ExitCode.USAGE
    assert "PMI_RANK is set, but not PMI_SIZE" in capsys.readouterr().err
    assert main(["launchers", "--json"]) == ExitCode.OK
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed["environments"]][:2] == ["torchrun", "slurm"]
    assert "local" in [each["name"] for each in listed["launchers"]]
