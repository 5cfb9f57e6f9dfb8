"""The watchdog that ends process groups when the launching process is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
from helpers.waiting import wait_until

_LAUNCHER = """
import subprocess, sys, time
from isotrain.core.launching.processes.orphan_guard import OrphanGuard
guard = OrphanGuard()
groups = [subprocess.Popen(["sleep", "600"], start_new_session=True).pid for _ in range(3)]
for group in groups:
    guard.watch(group)
guard.forget(groups[1])
print(*groups, flush=True)
time.sleep(600)
"""


def test_groups_are_ended_with_the_launcher_but_not_those_that_are_forgotten() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    with launcher, launcher.stdout:
        groups = [psutil.Process(int(pid)) for pid in launcher.stdout.readline().split()]
        try:
            launcher.kill()
            launcher.wait()
            ended = groups[0], groups[2]
            wait_until(lambda: not any(is_alive(each) for each in ended), 30)
            assert is_alive(groups[1])
        finally:
            if is_alive(groups[1]):
                os.kill(groups[1].pid, signal.SIGKILL)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
