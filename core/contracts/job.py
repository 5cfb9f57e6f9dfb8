"""What a process of a run is given to do."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isotrain.core.planning.make_plan import Plan
from isotrain.core.plugins import choice as plugin_choice
from isotrain.core.plugins.choice import PluginChoice
from isotrain.core.spec.training_spec import TrainingSpec

if TYPE_CHECKING:
    from isotrain.core.running.session import Session

Work = Callable[["Session"], Any]
"""Called on every process with its session; what it returns is given back to the caller."""


@dataclass(frozen=True)
class Job:
    """One run's work, the same for every process.

    Attributes:
        work: What to do.
        spec: What to train.
        plan: How.
        key: A secret of this run's processes.
        plugins: Those that were asked for where the run was.
    """

    work: Work
    spec: TrainingSpec
    plan: Plan
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    plugins: PluginChoice = field(default_factory=lambda: plugin_choice.current().for_workers())
