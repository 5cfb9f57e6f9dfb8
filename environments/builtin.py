"""Registers the environments that come with isotrain, by the hook that a third party uses."""

from __future__ import annotations

from isotrain.plugin import EnvironmentRegister, hookimpl


@hookimpl
def isotrain_register_environments(register: EnvironmentRegister) -> None:
    """Registers each environment by reference, so that none is imported before it is used."""
    register.add("isotrain.environments.torchrun:Torchrun", name="torchrun")
    register.add("isotrain.environments.slurm:Slurm", name="slurm")
