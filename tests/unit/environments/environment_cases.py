"""Variables as launchers document them, and the cluster info that they give.

What SLURM, Open MPI, Hydra, torchrun, horovodrun and Ray really set is in `tests/launchers/recorded`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from isotrain.core.contracts.cluster_environment import ClusterInfo


def at(launcher: str, rank: int, world_size: int, job: str, **others: Any) -> ClusterInfo:
    return ClusterInfo(launcher, (), rank, world_size, job, **others)


def of_tf(cluster: dict[str, list[str]], kind: str, index: int) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
AT_TORCHRUN = at(
    *("torchrun", 3, 4, "abc@n01:29500"),
    local_rank=1,
    local_world_size=2,
    node_rank=1,
    coordinator="n01",
    restarts=2,
)
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n01", "MASTER_PORT": "2222"}
SBATCH = {
    "SLURM_JOB_ID": "71",
    "SLURM_JOB_NODELIST": "n[01-04]",
    "SLURM_NTASKS": "7",
    "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "n01",
}
SRUN = {
    **SBATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[02-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "n04",
}
AT_SRUN = at(
    *("slurm", 4, 5, "71.0.0"),
    local_rank=0,
    local_world_size=1,
    node_rank=2,
    host="n04",
    hosts=("n02", "n03", "n04"),
    coordinator="n02",
)
HETEROGENEOUS = {
    "SLURM_JOB_ID": "80",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "80",
    "SLURM_JOB_ID_HET_GROUP_1": "81",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n01",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu-a[1-2]-ib",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n01,gpu-a[1-2]-ib",
    "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "gpu-a2-ib",
    "SLURM_RESTART_COUNT": "1",
}
AT_HETEROGENEOUS = at(
    *("slurm", 3, 5, "80.1.1"),
    local_rank=0,
    local_world_size=2,
    node_rank=2,
    host="gpu-a2-ib",
    hosts=("n01", "gpu-a1-ib", "gpu-a2-ib"),
    coordinator="n01",
    restarts=1,
)
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-login-1-4711@1",
    "PMIX_HOSTNAME": "n02",
}
AT_MPIRUN = at(
    *("openmpi", 3, 4, "prterun-login-1-4711@1"),
    local_rank=1,
    local_world_size=2,
    host="n02",
    coordinator="login-1",
)
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
AT_HYDRA = at("mpich", 3, 4, "mpich", local_rank=1, local_world_size=2)
HOROVOD = {
    "HOROVOD_RANK": "2",
    "HOROVOD_SIZE": "3",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_HOSTNAME": "n02",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "41000",
}
AT_HOROVOD = at(
    *("horovod", 2, 3, "10.0.0.1:41000"),
    local_rank=1,
    local_world_size=2,
    host="n02",
    coordinator="10.0.0.1",
)
RAY = {
    "RAY_JOB_ID": "01000000",
    "RAY_TRAIN_WORLD_RANK": "1",
    "RAY_TRAIN_WORLD_SIZE": "2",
    "RAY_TRAIN_LOCAL_RANK": "0",
    "RAY_TRAIN_LOCAL_WORLD_SIZE": "1",
    "RAY_TRAIN_NODE_RANK": "1",
    "RAY_TRAIN_EXPERIMENT_NAME": "digits",
    "RAY_TRAIN_COORDINATOR": "10.0.0.7",
}
AT_RAY = at(
    *("ray", 1, 2, "01000000/digits"),
    local_rank=0,
    local_world_size=1,
    node_rank=1,
    coordinator="10.0.0.7",
)
POD = {
    "JOB_COMPLETION_INDEX": "1",
    "JOB_COMPLETIONS": "3",
    "JOB_COORDINATOR": "train-0.train",
    "JOB_UID": "5f1c",
    "HOSTNAME": "train-1",
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}
AT_POD = at(
    *("kubernetes", 1, 3, "5f1c.0"),
    local_rank=0,
    local_world_size=1,
    node_rank=1,
    host="train-1",
    coordinator="train-0.train",
)
POD_OF_JOBSET = {**POD, "JOBSET_JOB_INDEX": "1", "JOBSET_JOBS": "2", "JOBSET_RESTARTS": "4"}
TF = of_tf({"chief": ["a:1"], "worker": ["a:2", "b:1", "b:2"]}, "worker", 2)
AT_TF = at(
    *("tf_config", 3, 4, "a:1"),
    local_rank=1,
    local_world_size=2,
    node_rank=1,
    host="b",
    hosts=("a", "b"),
    coordinator="a",
    port=1,
)
JSRUN = {
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "LSB_JOBID": "321",
    "LSB_MCPU_HOSTS": "batch1 1 h01 42 h02 42",
    "PMIX_RANK": "3",
}
AT_JSRUN = at(
    *("lsf", 3, 4, "321"),
    local_rank=1,
    local_world_size=2,
    hosts=("h01", "h02"),
    coordinator="h01",
)
PBSDSH = {
    "PBS_JOBID": "9.server",
    "PBS_TASKNUM": "3",
    "PBS_NODENUM": "1",
    "PBS_VNODENUM": "2",
    "PBS_NP": "4",
}
AT_PBSDSH = at("pbs", 2, 4, "9.server", node_rank=1)
PALS = {
    "PBS_JOBID": "9.server",
    "PBS_TASKNUM": "7",
    "PALS_APID": "b0c1",
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_NODEID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
AT_PALS = at("pals", 3, 4, "b0c1", local_rank=1, local_world_size=2, node_rank=1)
FLUX = {
    "FLUX_JOB_ID": "ƒDCB6RV",
    "FLUX_JOB_ID_PATH": "/ƒD2e73NP/ƒDCB6RV",
    "FLUX_TASK_RANK": "5",
    "FLUX_JOB_SIZE": "8",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
AT_FLUX = at("flux", 5, 8, "/ƒD2e73NP/ƒDCB6RV", local_rank=1)
SAGEMAKER = {
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_CURRENT_HOST": "algo-2",
    "TRAINING_JOB_NAME": "digits-1",
}
AT_SAGEMAKER = at(
    *("sagemaker", 1, 2, "digits-1"),
    local_rank=0,
    local_world_size=1,
    node_rank=1,
    host="algo-2",
    hosts=("algo-1", "algo-2"),
    coordinator="algo-1",
)
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2"}
ON_ONE_HOST = {**HYDRA, "MPI_LOCALNRANKS": "4", "MPI_LOCALRANKID": "3"}
AT_ONE_HOST = replace(AT_HYDRA, local_rank=3, local_world_size=4, coordinator="127.0.0.1")

CASES: dict[str, tuple[dict[str, str], ClusterInfo | None]] = {
    "torchrun": (TORCHRUN, AT_TORCHRUN),
    "torchrun without a store of the agents": (
        {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"},
        replace(AT_TORCHRUN, port=29500),
    ),
    "env:// by hand": (
        BY_HAND,
        at("torchrun", 1, 2, "env@n01:2222", coordinator="n01", port=2222),
    ),
    "an address for torch alone": ({"MASTER_ADDR": "n01", "MASTER_PORT": "2222"}, None),
    "srun": (SRUN, AT_SRUN),
    "srun with PMI-2": ({**SRUN, "PMI_RANK": "4", "PMI_SIZE": "5"}, AT_SRUN),
    "srun with PMIx": ({**SRUN, "PMIX_RANK": "4", "PMIX_NAMESPACE": "slurm.71"}, AT_SRUN),
    "srun over a heterogeneous job": (HETEROGENEOUS, AT_HETEROGENEOUS),
    "the script of sbatch": (SBATCH, None),
    "the shell of salloc": ({**SRUN, "SLURM_STEP_ID": "4294967290"}, None),
    "torchrun in an srun for each host": ({**SRUN, **TORCHRUN}, AT_TORCHRUN),
    "torchrun in the script of sbatch": ({**SBATCH, **TORCHRUN}, AT_TORCHRUN),
    "torchrun's variables by a script under srun": (
        {**SRUN, **BY_HAND, "RANK": "4", "WORLD_SIZE": "5"},
        replace(AT_SRUN, environment="torchrun", job="env@n01:2222", coordinator="n01", port=2222),
    ),
    "mpirun": (MPIRUN, AT_MPIRUN),
    "mpirun of Open MPI 4": (
        {
            **MPIRUN,
            "PMIX_NAMESPACE": "3712548865",
            "OMPI_MCA_orte_hnp_uri": "3712548864.0;tcp://172.17.0.2,10.1.1.1:43697",
        },
        replace(AT_MPIRUN, job="3712548865", coordinator="172.17.0.2"),
    ),
    "mpirun inside srun's own daemons": ({**SRUN, **MPIRUN}, AT_MPIRUN),
    "Hydra": (HYDRA, AT_HYDRA),
    "Hydra in a step of SLURM": ({**SRUN, **HYDRA}, AT_HYDRA),
    "Hydra on one host": (ON_ONE_HOST, AT_ONE_HOST),
    "horovodrun": (HOROVOD, AT_HOROVOD),
    "Ray Train": (RAY, AT_RAY),
    "Ray Train with TorchTrainer": ({"RAY_JOB_ID": "01000000", **TORCHRUN}, AT_TORCHRUN),
    "an Indexed Job": (POD, AT_POD),
    "a JobSet": (
        POD_OF_JOBSET,
        replace(AT_POD, rank=4, world_size=6, node_rank=4, job="5f1c.4", restarts=4),
    ),
    "torchrun in a pod": ({**POD, **TORCHRUN}, AT_TORCHRUN),
    "torchrun in a pod of a Job that does not say more": (
        {"JOB_COMPLETION_INDEX": "1", **TORCHRUN},
        AT_TORCHRUN,
    ),
    "a pod of a Deployment": ({"HOSTNAME": "x", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, None),
    "TF_CONFIG": (TF, AT_TF),
    "TF_CONFIG of a chief": (
        of_tf({"worker": ["b:1"], "chief": ["[::1]:1"]}, "chief", 0),
        at(
            *("tf_config", 0, 2, "::1:1"),
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            host="::1",
            hosts=("::1", "b"),
            coordinator="::1",
            port=1,
        ),
    ),
    "TF_CONFIG of a process alone": ({"TF_CONFIG": '{"cluster": {}}'}, None),
    "jsrun": (JSRUN, AT_JSRUN),
    "jsrun with Spectrum MPI": (
        {**JSRUN, **{n: t for n, t in MPIRUN.items() if n.startswith("OMPI")}},
        replace(AT_JSRUN, environment="openmpi", job="openmpi"),
    ),
    "pbsdsh of Torque": (PBSDSH, AT_PBSDSH),
    "the script of a PBS job": ({**PBSDSH, "PBS_TASKNUM": "1", "PBS_VNODENUM": "0"}, None),
    "mpirun in a job of OpenPBS": (
        {**MPIRUN, "PBS_JOBID": "9.server", "PBS_TASKNUM": "5"},
        AT_MPIRUN,
    ),
    "PALS in a job of PBS Professional": (PALS, AT_PALS),
    "flux run": (FLUX, AT_FLUX),
    "flux run on one host": (
        {**FLUX, "FLUX_JOB_NNODES": "1"},
        replace(AT_FLUX, local_world_size=8, coordinator="127.0.0.1"),
    ),
    "a training job of SageMaker": (SAGEMAKER, AT_SAGEMAKER),
    "mpirun in a training job of SageMaker": ({**SAGEMAKER, **MPIRUN}, AT_MPIRUN),
    "a launcher with PMI alone": (PMI, at("pmi", 1, 2, "pmi")),
    "what a person says of the coordinator and the job": (
        {**HYDRA, "ISOTRAIN_COORDINATOR": "n01", "ISOTRAIN_JOB": "mine"},
        replace(AT_HYDRA, coordinator="n01", job="mine"),
    ),
}
HALVES: dict[str, tuple[dict[str, str], list[str]]] = {
    "torchrun": (TORCHRUN, ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]),
    "slurm": (
        SRUN,
        [
            *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
            *("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
        ],
    ),
    "openmpi": (
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
    ),
    "mpich": ({**HYDRA}, ["MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE"]),
    "horovod": (HOROVOD, ["HOROVOD_RANK", "HOROVOD_SIZE"]),
    "ray": (RAY, ["RAY_TRAIN_WORLD_RANK", "RAY_TRAIN_WORLD_SIZE", "RAY_TRAIN_COORDINATOR"]),
    "kubernetes": (
        POD_OF_JOBSET,
        [
            *("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS", "JOB_COORDINATOR"),
            *("JOBSET_JOB_INDEX", "JOBSET_JOBS"),
        ],
    ),
    "lsf": (JSRUN, ["JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "LSB_JOBID"]),
    "pbs": (PBSDSH, ["PBS_VNODENUM", "PBS_NP"]),
    "pals": (
        {name: text for name, text in PALS.items() if not name.startswith("PBS")},
        ["PALS_RANKID", "PALS_APID", "PMI_SIZE"],
    ),
    "flux": (
        {name: text for name, text in FLUX.items() if name != "FLUX_JOB_ID_PATH"},
        ["FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_JOB_ID"],
    ),
    "sagemaker": (SAGEMAKER, ["SM_HOSTS", "SM_CURRENT_HOST"]),
    "pmi": (PMI, ["PMI_RANK", "PMI_SIZE"]),
}
"""By launcher: variables, and those that it always sets. `TF_CONFIG` is a variable alone."""
WRONG: dict[str, tuple[dict[str, str], str]] = {
    "elastic horovodrun": ({**HOROVOD, "HOROVOD_ELASTIC": "1"}, "HOROVOD_ELASTIC is set"),
    "PMIx alone": ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, "PMIX_RANK is set, but not PMI_RANK"),
    "pbsdsh of OpenPBS": ({"PBS_JOBID": "9", "PBS_TASKNUM": "5"}, "not PBS_VNODENUM and PBS_NP"),
    "a rank beyond the number": ({**SRUN, "SLURM_PROCID": "5"}, "the rank is 5 of 5 processes"),
    "a list of hosts that is none": (
        {**SRUN, "SLURM_STEP_NODELIST": "n[2"},
        "slurm: SLURM_STEP_NODELIST: 'n[2' is no list of hosts",
    ),
    "a parameter server": (of_tf({"worker": ["a:1"], "ps": ["b:1"]}, "ps", 0), "is a 'ps'"),
    "TF_CONFIG that is no JSON": ({"TF_CONFIG": "worker"}, "TF_CONFIG is 'worker'"),
    "TF_CONFIG without a task": (
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
        "expected such",
    ),
    "a task that is not in its cluster": (of_tf({"worker": ["a:1"]}, "worker", 1), "expected such"),
    "an address without a port": (of_tf({"worker": ["a"]}, "worker", 0), "expected such as"),
    "a worker that Ray had started before its job came": (
        {**RAY, "RAY_JOB_ID": "ffffffff"},
        "Set it to ray.get_runtime_context().get_job_id()",
    ),
    "a host that SageMaker does not list": (
        {**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"},
        "expected one of SM_HOSTS: algo-1, algo-2",
    ),
    "hosts of SageMaker that are no list": ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, "a JSON list"),
    "torchrun beside horovodrun": ({**TORCHRUN, **HOROVOD}, "HOROVOD_RANK"),
    "TF_CONFIG beside torchrun": ({**TORCHRUN, **TF}, "TF_CONFIG"),
}
