"""Registers isotrain's own cluster environments, by the same hook as third parties."""

from __future__ import annotations

from isotrain.plugin import EnvironmentRegistry, hookimpl

_ENVIRONMENTS = {
    "torchrun": "isotrain.environments.torchrun:Torchrun",
    "slurm": "isotrain.environments.slurm:Slurm",
    "openmpi": "isotrain.environments.openmpi:OpenMPI",
    "mpich": "isotrain.environments.mpich:Mpich",
    "horovod": "isotrain.environments.horovod:Horovod",
    "ray": "isotrain.environments.ray:Ray",
    "kubernetes": "isotrain.environments.kubernetes:Kubernetes",
    "tf_config": "isotrain.environments.tf_config:TFConfig",
    "lsf": "isotrain.environments.lsf:Lsf",
    "pbs": "isotrain.environments.pbs:Pbs",
    "pals": "isotrain.environments.pals:Pals",
    "flux": "isotrain.environments.flux:Flux",
    "sagemaker": "isotrain.environments.sagemaker:SageMaker",
    "pmi": "isotrain.environments.pmi:Pmi",
}


@hookimpl
def isotrain_register_environments(register: EnvironmentRegistry) -> None:
    """Registers each environment by reference; it is imported on first use."""
    for name, reference in _ENVIRONMENTS.items():
        register.add(reference, name=name)
