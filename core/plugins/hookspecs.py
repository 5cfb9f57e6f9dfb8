"""The hook specifications of isotrain (pluggy); a plugin implements any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from isotrain.core.plugins.registries import (
        BackendRegistry,
        CallbackRegistry,
        EnvironmentRegistry,
        LauncherRegistry,
        LoggerRegistry,
        ModelRegistry,
        StrategyRegistry,
    )

PROJECT = "isotrain"
API_VERSION = "1.0"
"""Version of the plugin API, `MAJOR.MINOR`; see `docs/api.md`."""
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def isotrain_register_backends(register: BackendRegistry) -> None:
    """Registers backends: `register.add(adapter_class_or_reference)`."""


@hookspec
def isotrain_register_strategies(register: StrategyRegistry) -> None:
    """Registers strategies: `register.add(strategy_class_or_reference)`."""


@hookspec
def isotrain_register_launchers(register: LauncherRegistry) -> None:
    """Registers launchers: `register.add(launcher_class_or_reference)`."""


@hookspec
def isotrain_register_environments(register: EnvironmentRegistry) -> None:
    """Registers cluster environments: `register.add(environment_class_or_reference)`."""


@hookspec
def isotrain_register_models(register: ModelRegistry) -> None:
    """Registers models: `register.add(builder_or_reference, name=...)`."""


@hookspec
def isotrain_register_loggers(register: LoggerRegistry) -> None:
    """Registers loggers: `register.add(logger_class_or_reference)`."""


@hookspec
def isotrain_register_callbacks(register: CallbackRegistry) -> None:
    """Registers callbacks: `register.add(callback_or_reference, name=...)`."""


@hookspec
def isotrain_run_started(plan: dict[str, Any], run_directory: str) -> None:
    """A run's processes are about to start. Called in the launching process, like all event hooks."""


@hookspec
def isotrain_epoch_ended(
    epoch: int, step: int, metrics: dict[str, float], run_directory: str
) -> None:
    """An epoch ended; `metrics` are its means: `loss`, metrics, and of the evaluation `validation_*`."""


@hookspec
def isotrain_checkpoint_saved(step: int, location: str, run_directory: str) -> None:
    """A checkpoint of the state after `step` steps is complete, in the folder or URL `location`."""


@hookspec
def isotrain_run_failed(message: str, run_directory: str) -> None:
    """A run failed or was interrupted, also by Ctrl-C."""


@hookspec
def isotrain_run_finished(result: dict[str, Any], run_directory: str) -> None:
    """`isotrain.run` succeeded; `result` is the content of `result.json`. Not called for `launch`."""
