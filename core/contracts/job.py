"""The job that a launcher gives every process of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from isotrain.core.contracts.plan import Plan
    from isotrain.core.spec.training_spec import TrainingSpec

Work = Callable[[Any], Any]
"""Function that every process calls with its session; its return value goes back to the launching process."""


class InternalWork(ABC):
    """Work of isotrain other than training, in a form that ranks of a scheduler can be sent as JSON.

    Attributes:
        name: Name of the work in JSON.
    """

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, session: Any) -> dict[str, Any]:
        """Does the work; returns JSON values, among them the session's `plan`."""

    def fields(self) -> dict[str, Any]:
        """Constructor arguments as JSON values."""
        return dict(vars(self))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Inverse of `fields`."""
        return cls(**fields)


@dataclass(frozen=True, eq=False)
class PluginChoice:
    """Plugins that one process uses besides the built-in ones; sent to the processes of a run.

    Attributes:
        requested: Modules and files of `--plugin`.
        blocked: Names of plugins not to load.
        registered: Name and plugin of each `isotrain.register` call, in order.
        installed: Plugins of installed packages; None if not searched yet.
    """

    requested: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    registered: tuple[tuple[str, object], ...] = ()
    installed: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Job:
    """Job of a run, equal on all processes.

    Attributes:
        work: Function to call with the session.
        spec: Training spec.
        plan: Plan of the run.
        key: Secret by which the processes of a parameter-server run authenticate each other; empty in others.
        plugins: Plugins of the launching process.
        resume: Folder or URL of the checkpoint to resume from; None to start anew.
        ignored_log_lines: Log lines that explain no failure; see `Adapter`.
        interface: Network interface for communication between hosts; None for the default.
        may_stop: Whether the launching process may request that training ends early.
    """

    work: Work
    spec: TrainingSpec
    plan: Plan
    key: bytes = field(repr=False)
    plugins: PluginChoice
    resume: str | None = None
    ignored_log_lines: tuple[str, ...] = ()
    interface: str | None = None
    may_stop: bool = False
