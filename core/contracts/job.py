"""What a process of a run is given to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from isotrain.core.contracts.plan import Plan
    from isotrain.core.spec.training_spec import TrainingSpec

Work = Callable[[Any], Any]
"""Called on every process with its session; what it returns is given back to the caller."""


class InternalWork(ABC):
    """Work of isotrain's own that is not training, which also the ranks of an engine can be told to do.

    Attributes:
        name: Under which they know it.
    """

    name: ClassVar[str]

    @abstractmethod
    def __call__(self, session: Any) -> dict[str, Any]:
        """Does it; returns plain values, and among them the `plan` of the session."""

    def fields(self) -> dict[str, Any]:
        """What it is made from again, as JSON values."""
        return dict(vars(self))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Makes it again from what `fields` gave."""
        return cls(**fields)


@dataclass(frozen=True, eq=False)
class PluginChoice:
    """What was asked for in one process; it travels to the processes of a run.

    Attributes:
        asked: Modules and files of `--plugin`.
        blocked: Names of plugins to leave out.
        registered: Name to plugin, by `isotrain.register`, in order.
        installed: What installed packages offer, once somebody has looked; None: nobody has.
    """

    asked: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    registered: tuple[tuple[str, object], ...] = ()
    installed: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Job:
    """One run's work, the same for every process.

    Attributes:
        work: What to do.
        spec: What to train.
        plan: How.
        key: A secret of this run's processes.
        plugins: Those that were asked for where the run was.
        resume: The checkpoint to go on from: its folder or URL.
        ignored_log_lines: Of the backend's logs; see `Adapter`.
        interface: The network interface over which its processes talk, where they are on several hosts.
    """

    work: Work
    spec: TrainingSpec
    plan: Plan
    key: bytes = field(repr=False)
    plugins: PluginChoice
    resume: str | None = None
    ignored_log_lines: tuple[str, ...] = ()
    interface: str | None = None
