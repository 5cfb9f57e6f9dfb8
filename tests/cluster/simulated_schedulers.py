"""What schedulers that cannot be had here would set, for two processes on each of two hosts.

How they are read one by one is tested with what their documentation shows; here runs are started by them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

HOSTS = ("node1", "node2")
SLOTS = 2
SIZE = len(HOSTS) * SLOTS
Variables = dict[str, str]


def _tf_config(rank: int) -> Variables:
    workers = [f"{HOSTS[each // SLOTS]}:{12000 + each}" for each in range(SIZE)]
    task = {"type": "worker", "index": rank}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def _lsf(rank: int) -> Variables:
    told = {"RANK": rank, "SIZE": SIZE, "LOCAL_RANK": rank % SLOTS, "LOCAL_SIZE": SLOTS}
    numbers = {f"JSM_NAMESPACE_{name}": str(number) for name, number in told.items()}
    return {**numbers, "LSB_JOBID": "321", "LSB_MCPU_HOSTS": "batch1 1 node1 2 node2 2"}


def _pbs(rank: int) -> Variables:
    numbers = {"TASKNUM": rank + 2, "NODENUM": rank // SLOTS, "VNODENUM": rank, "NP": SIZE}
    told = {f"PBS_{name}": str(number) for name, number in numbers.items()}
    return {**told, "PBS_JOBID": "9.server", "ISOTRAIN_COORDINATOR": HOSTS[0]}


def _pals(rank: int) -> Variables:
    numbers = {"RANKID": rank, "LOCAL_RANKID": rank % SLOTS, "LOCAL_SIZE": SLOTS}
    told = {f"PALS_{name}": str(number) for name, number in numbers.items()}
    return {**told, **_pmi(rank), "PALS_NODEID": str(rank // SLOTS), "PALS_APID": "b0c1"}


def _flux(rank: int) -> Variables:
    numbers = {"TASK_RANK": rank, "JOB_SIZE": SIZE, "TASK_LOCAL_ID": rank % SLOTS, "JOB_NNODES": 2}
    told = {f"FLUX_{name}": str(number) for name, number in numbers.items()}
    return {**told, "FLUX_JOB_ID": "f23", "ISOTRAIN_COORDINATOR": HOSTS[0]}


def _sagemaker(rank: int) -> Variables:
    """It starts one process on a host, so these are two names for each of the two."""
    names = [f"{host}.{each}" for host in HOSTS for each in range(SLOTS)]
    told = {"SM_HOSTS": json.dumps(names), "SM_CURRENT_HOST": names[rank]}
    return {**told, "TRAINING_JOB_NAME": "digits-1", "ISOTRAIN_COORDINATOR": HOSTS[0]}


def _pmi(rank: int) -> Variables:
    told = {"PMI_RANK": str(rank), "PMI_SIZE": str(SIZE)}
    return {**told, "ISOTRAIN_COORDINATOR": HOSTS[0], "ISOTRAIN_JOB": "mine"}


SCHEDULERS: Mapping[str, Callable[[int], Variables]] = {
    "tf_config": _tf_config,
    "lsf": _lsf,
    "pbs": _pbs,
    "pals": _pals,
    "flux": _flux,
    "sagemaker": _sagemaker,
    "pmi": _pmi,
}
"""By name: the variables of a rank."""
