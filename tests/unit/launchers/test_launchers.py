"""What each launcher gives its program: pure functions of options, variables and the command of a rank."""

from __future__ import annotations

import dataclasses
import json
import os
import pwd
import shlex
from pathlib import Path
from typing import Any

import pytest
from unit.launchers.rank_command import COMMAND, KEY, recorded

from isotrain.core.errors import ClusterInfoError, PlanError
from isotrain.core.plugins.manager import plugin_manager
from isotrain.launchers import host_options, mpi
from isotrain.launchers.horovodrun import HorovodrunLauncher
from isotrain.launchers.host_options import HostOptions
from isotrain.launchers.mpi import MpiLauncher
from isotrain.launchers.ray import RayLauncher
from isotrain.launchers.slurm import SlurmLauncher
from isotrain.launchers.torchrun import TorchrunLauncher
from isotrain.plugin import HostSlots, RankCommand, SchedulerLauncher

LAUNCHERS = ("slurm", "mpi", "torchrun", "horovodrun", "ray", "kubernetes")


def test_every_rank_gets_the_same_command() -> None:
    assert COMMAND.arguments[1:] == (
        *("-m", "isotrain", "run", "env:ISOTRAIN_SPEC"),
        *("--backend", "torch-ddp:gloo", "--json"),
        *("--output", "/shared/a run/launcher/rank-0"),
    )


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_are_registered_and_refuse_single_process_backends(name: str) -> None:
    host = plugin_manager()
    launcher = host.launcher(name)
    assert isinstance(launcher, SchedulerLauncher)
    assert launcher.refuses(host.backend("torch-ddp"), 2) is None
    assert launcher.refuses(host.backend("tf-mirrored"), 2) is not None
    assert launcher.refuses(host.backend("tf-mirrored"), 1) is None


@pytest.mark.parametrize(
    "launcher",
    [
        SlurmLauncher(nodes=2, tasks_per_node=2),
        TorchrunLauncher(hosts="a:2,b:2"),
        HorovodrunLauncher(hosts="a:2,b:2"),
        MpiLauncher(hosts="a:2,b:2"),
        RayLauncher(workers=4),
    ],
    ids=lambda launcher: launcher.name,
)
def test_key_and_spec_are_on_no_command_line(
    launcher: SchedulerLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "flavor", lambda mpirun: "open-mpi")
    found = launcher.submission(COMMAND)
    assert launcher.allocation().slots == 4
    shown = [found.commands, found.variables, found.files.get("job.sh")]
    assert KEY not in json.dumps(shown)
    assert "m:build" not in json.dumps(found.commands)


@pytest.mark.parametrize("launcher", ["mpi", "torchrun", "horovodrun"])
def test_a_lost_host_is_left_out(launcher: str) -> None:
    hosts = plugin_manager().launcher(launcher, {"hosts": "a.net:2,b.net:4,c:1"})
    assert hosts.without("b") == {"hosts": "a.net:2,c:1"}
    with pytest.raises(PlanError, match="d cannot be left out"):
        hosts.without("d")
    with pytest.raises(PlanError, match="a cannot be left out of this machine:1"):
        plugin_manager().launcher(launcher).without("a")
    with_gpus = plugin_manager().launcher(launcher, {"hosts": "a:2,b:2", "gpus_per_host": 4})
    assert with_gpus.without("b") == {"hosts": "a:2", "gpus_per_host": 4}


class TestMpi:
    def test_open_mpi_begins_with_its_own_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mpi, "flavor", lambda mpirun: "open-mpi")
        for own, first in (("node2.net", "node2"), ("other", "node1")):
            monkeypatch.setattr(host_options.socket, "gethostname", lambda own=own: own)
            found = MpiLauncher(hosts="node1:2,node2:2").submission(COMMAND)
            assert found.variables["ISOTRAIN_COORDINATOR"] == first

    def test_open_mpi(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mpi, "flavor", lambda mpirun: "open-mpi")
        found = MpiLauncher(hosts="node1:2,node2:2").submission(COMMAND)
        (command,) = found.commands
        mine = [*command[: -len(COMMAND.arguments)]]
        assert mine[:5] == ["mpirun", "--bind-to", "none", "--host", "node1:2,node2:2"]
        named = ("PYTHONPATH", "ISOTRAIN_COORDINATOR", "ISOTRAIN_JOB", *COMMAND.secret_variables)
        assert mine[-12:] == [*(part for name in named for part in ("-x", name)), "-np", "4"]
        assert found.variables == {
            "ISOTRAIN_COORDINATOR": "node1",
            "ISOTRAIN_JOB": "isotrain-digits",
            "OMPI_MCA_odls_base_sigkill_timeout": "4",
        }

    def test_hydra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mpi, "flavor", lambda mpirun: "hydra")
        (command,) = MpiLauncher(processes=2).submission(COMMAND).commands
        assert command == ("mpirun", "-np", "2", *COMMAND.arguments)
        (command,) = MpiLauncher(hosts="a:2,b:2").submission(COMMAND).commands
        assert command[1:5] == ("-launcher", "ssh", "-hosts", "a:2,b:2")

    def test_the_mpi_flavor_may_be_given_without_mpirun(self) -> None:
        launcher = MpiLauncher(processes=2, mpirun="no-such-mpirun", flavor="hydra")
        (command,) = launcher.submission(COMMAND).commands
        assert command == ("no-such-mpirun", "-np", "2", *COMMAND.arguments)
        with pytest.raises(PlanError, match="flavor: expected one of open-mpi, hydra, received"):
            MpiLauncher(flavor="lam")  # type: ignore[arg-type]

    def test_an_unknown_mpi_is_refused(self) -> None:
        with pytest.raises(PlanError, match="an MPI that isotrain does not know"):
            MpiLauncher(mpirun="true").submission(COMMAND)


class TestTorchrun:
    def test_on_this_machine(self) -> None:
        found = TorchrunLauncher(processes=2).submission(COMMAND)
        (command,) = found.commands
        assert command[1:5] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        assert command[-len(COMMAND.arguments) :] == COMMAND.arguments
        assert found.key_in_environment

    def test_on_several_hosts_an_agent_reads_key_and_spec(self) -> None:
        found = TorchrunLauncher(hosts="a:2,b:2", ssh="ssh -p 2222").submission(COMMAND)
        assert [command[:4] for command in found.commands] == [
            ("ssh", "-p", "2222", "a"),
            ("ssh", "-p", "2222", "b"),
        ]
        text = found.commands[1][4]
        assert "--rdzv-endpoint=a:29400" in text
        assert "'PYTHONPATH=/my code'" in text
        assert text.endswith(shlex.join(COMMAND.arguments))
        assert (found.stdin, found.key_in_environment) == (
            f'{KEY}\n{{"model": "m:build"}}\n',
            False,
        )

    def test_uneven_hosts_are_refused(self) -> None:
        with pytest.raises(PlanError, match="the same number of processes on every host"):
            TorchrunLauncher(hosts="a:2,b:1").submission(COMMAND)

    def test_ssh_is_for_other_hosts_alone_also_where_the_job_names_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host_options.socket, "gethostname", lambda: "n1.net")
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        for nodes, usable in (("n[1-2]", False), ("n1", True), ("n2", False), ("n[", False)):
            monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
            assert TorchrunLauncher(ssh="no-such-ssh").availability().available == usable
        own, other = TorchrunLauncher(hosts="n1:2,n2:2").submission(COMMAND).commands
        assert (own[:2], other[:2]) == (("sh", "-c"), ("ssh", "n2"))
        assert own[2] == other[2]


def test_horovodrun_gets_the_path_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as homeless:
        homeless.delenv("HOME")
        homeless.setattr(pwd, "getpwuid", dict[int, Any]().__getitem__)
        assert HorovodrunLauncher(processes=2).submission(COMMAND).files == {"key": KEY}
    monkeypatch.setattr(RankCommand, "key_file", tmp_path / "key")
    found = HorovodrunLauncher(hosts="a:2,b:2").submission(COMMAND)
    (command,) = found.commands
    options = ("--gloo", "-np", "4", "-H", "a:2,b:2")
    assert command[1:] == ("-m", "horovod.runner.launch", *options, *COMMAND.arguments)
    assert not found.key_in_environment
    assert found.files == {"key": KEY}
    assert found.variables["ISOTRAIN_KEY_FILE"] == "/shared/a run/launcher/key"
    here = HorovodrunLauncher(processes=2).submission(COMMAND)
    told = {"ISOTRAIN_KEY_FILE": "/shared/a run/launcher/key"}
    assert (here.key_in_environment, here.files, here.variables) == (False, {"key": KEY}, told)
    (tmp_path / "key").touch()
    for where in ({"hosts": "a:2,b:2"}, {"processes": 2}):
        found = plugin_manager().launcher("horovodrun", where).submission(COMMAND)
        assert (found.files, "ISOTRAIN_KEY_FILE" in found.variables) == ({}, False)
        assert not found.key_in_environment


class TestHosts:
    def test_hosts_and_slots(self) -> None:
        found = HostOptions("mpi", "node1:2, node2").allocation({})
        assert found.host_slots == (HostSlots(2, "node1"), HostSlots(1, "node2"))
        assert (found.hosts, found.slots, found.is_even) == (("node1", "node2"), 3, False)

    @pytest.mark.parametrize("text", ["", "a:0", "a:x", "a b", "a,,b"])
    def test_malformed_hosts_are_refused(self, text: str) -> None:
        with pytest.raises(PlanError, match="mpi: hosts: expected HOST or HOST:SLOTS"):
            HostOptions("mpi", text).allocation({})

    def test_no_process_is_refused(self) -> None:
        with pytest.raises(PlanError, match="expected at least 1, received 0"):
            HostOptions("mpi", processes=0)

    def test_local_processes_and_hosts_are_exclusive(self) -> None:
        with pytest.raises(PlanError, match="processes: it is for this machine"):
            HostOptions("mpi", "a:2", processes=2)

    def test_devices_are_as_given_or_as_detected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(host_options, "visible_gpus", lambda variables: len(variables))
        assert HostOptions("mpi", processes=2).allocation({"A": "1"}).host_slots == (
            HostSlots(2, None, 1),
        )
        assert HostOptions("mpi", "a,b").allocation({"A": "1"}).devices is None
        said = HostOptions("mpi", "a,b:2", gpus=3).allocation({"A": "1"})
        assert said.host_slots == (HostSlots(1, "a", 3), HostSlots(2, "b", 3))


class TestJobs:
    """Hosts that were left out are those of the job that this process is in."""

    def test_hosts_of_a_slurm_job(self) -> None:
        job = {**recorded("sbatch-script"), "SLURM_GPUS_ON_NODE": "4"}
        found = HostOptions("mpi").allocation(job)
        assert found.host_slots == (HostSlots(2, "node1", 4), HostSlots(2, "node2", 4))
        assert HostOptions("mpi", processes=3).allocation(job).hosts == ()
        assert HostOptions("mpi", "other:1").allocation(job).hosts == ("other",)

    @pytest.mark.parametrize(
        ("told", "named"),
        [
            ({}, "SLURM_JOB_ID is set, but not SLURM_JOB_NODELIST"),
            ({"SLURM_JOB_NODELIST": "n["}, "SLURM_JOB_NODELIST: "),
            (
                {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "1"},
                r"SLURM_TASKS_PER_NODE is '1' \(nodes: 1\), and SLURM_JOB_NODELIST is 'n\[1-4\]'",
            ),
            ({"SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "gpu:2"}, "SLURM_GPUS_ON_NODE is"),
        ],
    )
    def test_inconsistent_slurm_variables_are_refused(
        self, told: dict[str, str], named: str
    ) -> None:
        job = {"SLURM_JOB_ID": "7", **told}
        with pytest.raises(PlanError, match=f"{named}.* hosts=.*, or say processes=N"):
            HostOptions("mpi").allocation(job)
        assert HostOptions("mpi", processes=2).allocation(job).slots == 2
        with pytest.raises(ClusterInfoError, match=named):
            SlurmLauncher().allocation_in(job)

    @pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
    def test_hosts_of_a_host_file(self, variable: str, tmp_path: Path) -> None:
        file = tmp_path / "hosts"
        job = {variable: str(file)}
        with pytest.raises(PlanError, match=rf"{variable}: .*hosts has .*, and cannot be read"):
            HostOptions("mpi").allocation(job)
        file.write_text("")
        with pytest.raises(PlanError, match=rf"{variable}: .* names none"):
            HostOptions("mpi").allocation(job)
        file.write_text("b.net\nb.net\na.net\n")
        found = HostOptions("mpi").allocation(job)
        assert found.host_slots == (HostSlots(2, "b.net"), HostSlots(1, "a.net"))

    def test_a_launcher_uses_the_hosts_of_its_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "environ", recorded("sbatch-script"))
        assert TorchrunLauncher().without("node1") == {"hosts": "node2:2"}
        (command,) = MpiLauncher(flavor="hydra").submission(COMMAND).commands
        assert command[1:5] == ("-hosts", "node1:2,node2:2", "-np", "4")
        (command,) = HorovodrunLauncher().submission(COMMAND).commands
        assert command[4:8] == ("-np", "4", "-H", "node1:2,node2:2")
        assert len(TorchrunLauncher().submission(COMMAND).commands) == 2


class TestRay:
    def test_an_actor_for_each_rank_is_asked_for(self) -> None:
        launcher = RayLauncher(2, 1.5, 1, {"disk": 1}, "STRICT_SPREAD", "node1:6379")
        (command,) = launcher.submission(COMMAND).commands
        assert command[1:3] == ("-m", "isotrain.launchers.ray_main")
        asked = dict(zip(command[3:11:2], command[4:11:2], strict=True))
        assert json.loads(asked.pop("--bundle")) == {"CPU": 1.5, "GPU": 1, "disk": 1}
        told = {"--workers": "2", "--placement": "STRICT_SPREAD", "--address": "node1:6379"}
        assert asked == told
        names = ("PYTHONPATH", "ISOTRAIN_KEY", "ISOTRAIN_SPEC")
        handed_on = (*(part for name in names for part in ("-x", name)), "--", *COMMAND.arguments)
        assert command[11:] == handed_on

    def test_the_ranks_of_an_elastic_run_outlive_each_other_and_are_replaced(self) -> None:
        (program,) = RayLauncher(2).submission(COMMAND).commands
        assert "--elastic" not in program
        elastic = {"spec_text": '{"elastic": {"min": 2}}', "replacements": 3}
        (program,) = RayLauncher(2).submission(dataclasses.replace(COMMAND, **elastic)).commands
        at = program.index("--elastic")
        assert program[at + 2 : at + 4] == ("--replacements", "3")
        joins = json.loads(program[at + 1])
        assert joins[1:] == ["-m", "isotrain", "join", str(COMMAND.run_directory)]

    def test_a_host_is_left_out_where_it_has_one_worker(self) -> None:
        assert RayLauncher(3, placement="STRICT_SPREAD").without("b") == {"workers": 2}
        for few in (RayLauncher(3), RayLauncher(1, placement="STRICT_SPREAD")):
            with pytest.raises(PlanError, match="only with placement=STRICT_SPREAD"):
                few.without("b")

    def test_one_host_is_known_without_ray(self) -> None:
        assert RayLauncher(4, gpus=1).allocation().host_slots == (HostSlots(1, devices=1),) * 4
        packed = RayLauncher(4, gpus=1, placement="STRICT_PACK").allocation()
        assert packed.host_slots == (HostSlots(4, devices=4),)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"workers": 0}, "workers: expected at least 1, received 0"),
            ({"placement": "NEAR"}, "expected one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
            ({"cpus": 0}, "a worker must request some resource"),
        ],
    )
    def test_impossible_ray_options_are_refused(self, options: Any, message: str) -> None:
        with pytest.raises(PlanError, match=message):
            RayLauncher(**options)


@pytest.mark.parametrize("name", ["horovodrun", "kubernetes", "mpi", "ray", "torchrun"])
def test_requested_replicas_are_processes_unless_options_say_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(os, "environ", {})
    option = {"kubernetes": "pods", "ray": "workers"}.get(name, "processes")
    assert plugin_manager().launcher(name, {}).options_for(4) == {option: 4}
    assert plugin_manager().launcher(name, {option: 1}).options_for(4) == {}


def test_the_slots_of_a_batch_job_are_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", recorded("sbatch-script"))
    assert MpiLauncher().options_for(3) == {}


def test_secrets_are_not_shown() -> None:
    assert KEY not in repr(COMMAND)
    assert KEY not in repr(dataclasses.replace(TorchrunLauncher(hosts="a,b").submission(COMMAND)))
