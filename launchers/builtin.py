"""Registers isotrain's own launchers, by the same hook as third parties."""

from __future__ import annotations

from isotrain.plugin import LauncherRegistry, hookimpl

_LAUNCHERS = {
    "slurm": "isotrain.launchers.slurm:SlurmLauncher",
    "mpi": "isotrain.launchers.mpi:MpiLauncher",
    "torchrun": "isotrain.launchers.torchrun:TorchrunLauncher",
    "horovodrun": "isotrain.launchers.horovodrun:HorovodrunLauncher",
    "ray": "isotrain.launchers.ray:RayLauncher",
    "kubernetes": "isotrain.launchers.kubernetes:KubernetesLauncher",
}


@hookimpl
def isotrain_register_launchers(register: LauncherRegistry) -> None:
    """Registers each launcher by reference; it is imported on first use."""
    for name, reference in _LAUNCHERS.items():
        register.add(reference, name=name)
