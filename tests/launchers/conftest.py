"""The bed that tests of launchers share, and what stands in for it where it cannot be made."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from cluster import hosts
from cluster.bed import Bed, two_hosts

REQUIRED_VARIABLE = "ISOTRAIN_ENGINES_REQUIRED"
"""Where it is set, lacking an engine or the right to make hosts fails the tests."""
PROGRAMS = ("srun", "slurmctld", "munged", "mpirun", "mpiexec.mpich", "sshd")
MODULES = ("torch", "horovod", "ray")


def missing() -> str | None:
    """Why there is no bed here; None where there can be one."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    absent = [name for name in PROGRAMS if not shutil.which(name, path=path)]
    absent += [name for name in MODULES if not find_spec(name)]
    if absent:
        return f"not installed: {', '.join(absent)} (make test-launchers installs them)"
    return hosts.why_not()


@pytest.fixture(scope="session")
def bed() -> Iterator[Bed]:
    """Two hosts, and the engines on them."""
    if reason := missing():
        (pytest.fail if os.environ.get(REQUIRED_VARIABLE) else pytest.skip)(reason)
    with two_hosts() as made:
        yield made
