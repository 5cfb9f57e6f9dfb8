"""Registers isotrain's local launcher and its loggers, by the hooks that third-party plugins use."""

from __future__ import annotations

from isotrain.core.plugins.hookspecs import hookimpl
from isotrain.core.plugins.registries import LauncherRegistry, LoggerRegistry

_LOGGERS = {
    "csv": "isotrain.core.loggers.csv:CsvLogger",
    "jsonl": "isotrain.core.loggers.jsonl:JsonLinesLogger",
    "tensorboard": "isotrain.core.loggers.tensorboard:TensorBoardLogger",
    "mlflow": "isotrain.core.loggers.mlflow:MlflowLogger",
    "wandb": "isotrain.core.loggers.wandb:WandbLogger",
}


@hookimpl
def isotrain_register_launchers(register: LauncherRegistry) -> None:
    """Registers the local launcher by reference; it is imported on first use."""
    register.add("isotrain.core.launching.local_launcher:LocalLauncher", name="local")


@hookimpl
def isotrain_register_loggers(register: LoggerRegistry) -> None:
    """Registers each logger by reference; it is imported on first use."""
    for name, reference in _LOGGERS.items():
        register.add(reference, name=name)
