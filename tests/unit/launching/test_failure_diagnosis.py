"""What is said of a failed run: the end of a log where it says something, and how far the run came."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from isotrain.core.contracts.events import Event, Failed, Finished, Heartbeat, Ready
from isotrain.core.contracts.process import ProcessInfo
from isotrain.core.contracts.reporter import BETWEEN_CALLS, CLOSE, Status
from isotrain.core.launching.run_directory.pipes import LineReader
from isotrain.core.launching.supervision.failure_diagnosis import RankStatus, evidence, run_failure
from isotrain.core.launching.supervision.supervisor import Supervisor
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.system.process_activity import activity

WARNING = """/venv/torch/nn/parallel/distributed.py:799: FutureWarning: broadcast_buffers is deprecated
  warnings.warn(

"""
ROUTINE_OUTPUT = """WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795311387.036603   21687 port.cc:153] oneDNN custom operations are on.
2026-11-22 01:34:00.1: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary
To enable the following instructions: AVX2 AVX512F, in other operations, rebuild TensorFlow
"""


def evidence_of(folder: Path, text: str, backend: str = "tf-multiworker") -> str:
    log = folder / "rank-1.log"
    log.write_text(text)
    process: Any = SimpleNamespace(log=log)
    ignored_log_lines = plugin_manager().backend(backend).ignored_log_lines
    return evidence(
        RankStatus(process, last_heard=0.0, last_active=0.0, ignored_log_lines=ignored_log_lines)
    )


@pytest.mark.parametrize("backend", ["tf-mirrored", "tf-multiworker", "horovod-tf"])
@pytest.mark.parametrize("text", ["", WARNING + ROUTINE_OUTPUT])
def test_routine_library_output_is_no_evidence(tmp_path: Path, text: str, backend: str) -> None:
    assert evidence_of(tmp_path, text, backend) == ""


def test_output_of_another_backends_libraries_is_evidence(tmp_path: Path) -> None:
    assert evidence_of(tmp_path, WARNING, "torch-ddp") == ""
    assert ROUTINE_OUTPUT.strip() in evidence_of(tmp_path, WARNING + ROUTINE_OUTPUT, "torch-ddp")


@pytest.mark.parametrize(
    "line",
    [
        "terminate called without an active exception",
        "E0000 00:00:1795311387.036603 21687 x.cc:1] out of memory",
        "  File 'model.py', line 3 in build",
        "Warning: my own words",
    ],
)
def test_output_of_the_process_is_evidence(tmp_path: Path, line: str) -> None:
    assert (
        evidence_of(tmp_path, WARNING + ROUTINE_OUTPUT + line + "\n")
        == f"the end of its log:\n{line}"
    )


def at(rank: int, step: int | None, call: str) -> RankStatus:
    process: Any = SimpleNamespace(
        rank=rank,
        status=Status(step, 0.0, call),
        log=Path("run", f"rank-{rank}.log"),
        exit_code=-9,
        is_gone=True,
        is_stopped=False,
        info=ProcessInfo(rank, "here", role="replica"),
    )
    return RankStatus(process, last_heard=0.0, last_active=0.0)


@pytest.mark.parametrize(
    ("places", "done"),
    [
        ([(7, "step"), (7, "step")], 7),
        ([(7, "step"), (7, BETWEEN_CALLS)], 8),
        ([(None, "restore"), (7, "step")], 7),
        ([(None, "build model"), (None, "build model")], None),
    ],
)
def test_the_steps_done_are_those_of_the_furthest_rank(
    places: list[tuple[int | None, str]], done: int | None
) -> None:
    everyone = [at(rank, *place) for rank, place in enumerate(places)]
    assert run_failure(everyone[0], everyone).steps_done == done


def test_a_rank_that_left_the_loop_alone_is_named() -> None:
    everyone = [at(0, 5, "step"), at(1, 4, CLOSE), at(2, 5, BETWEEN_CALLS)]
    told = "rank 1 left its loop after step 4, while others came to step 5"
    for culprit in everyone:
        assert told in str(run_failure(culprit, everyone))
    everyone[2].failure = Failed(
        error="RuntimeError", message="reset", traceback="", is_peer_error=True
    )
    assert told in str(run_failure(everyone[1], everyone))
    everyone[0] = at(0, None, "start")
    everyone[0].finished = True
    assert "rank 0 left its loop before its first step; rank 1" in str(
        run_failure(everyone[1], everyone)
    )
    everyone[:2] = at(0, 5, CLOSE), at(1, 5, CLOSE)  # as all do at the end
    assert "left its loop" not in str(run_failure(everyone[1], everyone))


def test_the_stack_of_a_slow_process_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.touch()
    reading, writing = os.pipe()
    process: Any = SimpleNamespace(
        info=ProcessInfo(0, "here", role="replica"),
        events=reading,
        output=None,
        read_lines=LineReader(reading).read,
        log=log,
        status=Status(3, time.monotonic() - 60.0, "step"),
        exit_code=None,
        is_gone=False,
        is_stopped=False,
        activity=0.0,
        waits={},
        request_stacks=lambda: threading.Timer(0.6, log.write_text, ["in a loop"]).start(),
    )
    os.write(writing, Heartbeat().to_line())
    limits = {"silence": 30.0, "start": 1.0, "progress": 1.0}
    failure = Supervisor([process], limits, lambda event: None).run()
    assert "in a loop" in str(failure)
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_finished_ranks_are_not_blamed_by_their_server() -> None:
    pipes = [os.pipe(), os.pipe()]
    processes: list[Any] = [
        SimpleNamespace(
            info=ProcessInfo(rank, "here", role=role),
            events=reading,
            output=None,
            read_lines=LineReader(reading).read,
            status=Status(3, time.monotonic(), BETWEEN_CALLS),
            exit_code=None,
            is_gone=False,
            is_stopped=False,
            activity=0.0,
            waits={},
        )
        for rank, (role, (reading, _)) in enumerate(
            zip(("coordinator", "server"), pipes, strict=True)
        )
    ]
    (_, of_coordinator), (_, of_server) = pipes
    gone = Failed(error="PeerLostError", message="gone", traceback="", is_peer_error=True)
    os.write(of_server, gone.to_line())

    def hear(event: Event) -> None:
        if isinstance(event, Failed):
            os.write(of_coordinator, Finished().to_line())

    limits = {"silence": 30.0, "start": 30.0, "progress": 30.0}
    assert Supervisor(processes, limits, hear).run() is None
    for descriptor in (*pipes[0], *pipes[1]):
        os.close(descriptor)


def test_processes_begin_once_though_they_are_ready_in_each_process_group() -> None:
    """Of an elastic run; else rank 0 would tell each of n others n times."""
    pipes, begun = [os.pipe() for _ in range(2)], list[int]()
    processes: Any = [
        SimpleNamespace(
            info=ProcessInfo(rank, "here"),
            events=reading,
            output=None,
            read_lines=LineReader(reading).read,
            status=Status(3, time.monotonic(), BETWEEN_CALLS),
            exit_code=None,
            is_gone=False,
            is_stopped=False,
            activity=0.0,
            waits={},
        )
        for rank, (reading, _) in enumerate(pipes)
    ]
    for _, writing in pipes:
        os.write(writing, 2 * Ready(samples=8).to_line() + Finished().to_line())
    limits = {"silence": 30.0, "start": 30.0, "progress": 30.0}
    supervisor = Supervisor(processes, limits, lambda event: None, lambda: begun.append(1))
    assert supervisor.run() is None
    assert begun == [1]
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)


def test_what_others_have_sent_before_a_process_was_lost_is_read_before_it_counts_as_lost() -> None:
    """Here another one is ready between the last look at its events and that at who is gone."""
    pipes = [os.pipe() for _ in range(2)]

    class Dying(SimpleNamespace):
        exit_code = -9

        @property
        def is_gone(self) -> bool:
            if not self.ready.is_set():
                self.ready.set()
                os.write(pipes[0][1], Ready(samples=8).to_line())
            return True

    facts: dict[str, Any] = {"output": None, "is_stopped": False, "activity": 0.0, "waits": {}}
    processes: list[Any] = [
        kind(
            **facts,
            info=ProcessInfo(rank, "here"),
            events=reading,
            read_lines=LineReader(reading).read,
            status=Status(3, time.monotonic(), BETWEEN_CALLS),
            log=Path("rank.log"),
            **fields,
        )
        for rank, ((reading, _), kind, fields) in enumerate(
            zip(
                pipes,
                (SimpleNamespace, Dying),
                ({"exit_code": None, "is_gone": False}, {"ready": threading.Event()}),
                strict=True,
            )
        )
    ]

    class Asked(Exception):
        """Who is ready once one counts as lost."""

    def lose(lost: Any, watched: Any) -> bool:
        raise Asked([each.ready for each in watched])

    members: Any = SimpleNamespace(
        note=lambda *_: True, lose=lose, regroup=lambda _: None, recruit=lambda _: []
    )
    limits = {"silence": 30.0, "start": 30.0, "progress": 30.0}
    supervisor = Supervisor(processes, limits, lambda event: None, members=members)
    with pytest.raises(Asked, match=r"\[True, False\]"):
        supervisor.run()
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)


ON_ANOTHER_THREAD = """
import threading
def spin():
    while True: pass
threading.Thread(target=spin).start()
threading.Event().wait()
"""


def busy(first: str = "pass") -> subprocess.Popen[bytes]:
    """Keeps the first processor busy, once it has done something else."""
    pin = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
    return subprocess.Popen([sys.executable, "-c", f"{pin}\n{first}\nwhile True: pass"])


def test_waiting_for_a_processor_is_not_idleness() -> None:
    others = [busy(), busy(), busy()]
    starved = busy(f"os.setpriority(os.PRIO_PROCESS, 0, 19)\n{ON_ANOTHER_THREAD}")
    idle = subprocess.Popen(["sleep", "60"])
    own, other = psutil.Process(starved.pid), psutil.Process(idle.pid)
    try:
        ready = (2, "sleeping", "sleep", "sleeping")
        while (own.num_threads(), own.status(), other.name(), other.status()) != ready:
            time.sleep(0.02)
        used, done, rest = sum(own.cpu_times()[:2]), activity(starved.pid), activity(idle.pid)
        deadline = time.monotonic() + 30
        while activity(starved.pid) < done + 0.5 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert activity(starved.pid) >= done + 0.5
        assert sum(own.cpu_times()[:2]) < used + 0.3
        assert activity(idle.pid) < rest + 0.3
    finally:
        for process in (*others, starved, idle):
            process.kill()
            process.wait()
