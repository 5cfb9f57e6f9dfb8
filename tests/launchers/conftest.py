"""The bed that tests of launchers share, and what stands in for it where it cannot be made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from typing import TypeVar

import pytest
from cluster import hosts
from cluster.two_hosts import TwoHostCluster, two_hosts

REQUIRED_VARIABLE = "ISOTRAIN_LAUNCHERS_REQUIRED"
"""Where it is set, no test may be skipped: neither for want of a launcher or of a right, nor otherwise."""
PROGRAMS = ("srun", "slurmctld", "munged", "mpirun", "mpiexec.mpich", "sshd")
MODULES = ("torch", "horovod", "ray", "kubernetes_validate")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def missing() -> str | None:
    """Why there is no bed here; None where there can be one."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    absent += [name for name in MODULES if not find_spec(name)]
    if absent:
        return f"not installed: {', '.join(absent)} (make test-launchers installs them)"
    return hosts.why_not()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Makes a failure of a test that is skipped where none may be."""
    return _required((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Does the same for a whole file."""
    return _required((yield))


def _required(report: Report) -> Report:
    if report.skipped and os.environ.get(REQUIRED_VARIABLE):
        report.outcome = "failed"
        report.longrepr = f"{REQUIRED_VARIABLE} is set, and this was skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def bed() -> Iterator[TwoHostCluster]:
    """Two hosts, and the launchers on them."""
    if reason := missing():
        pytest.skip(reason)
    with two_hosts() as made:
        yield made
