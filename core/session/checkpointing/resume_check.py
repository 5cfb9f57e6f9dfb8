"""Going on from a checkpoint: whether that can be, and what is another then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from isotrain.core.checkpoints.checkpoint import Checkpoint
from isotrain.core.contracts.device_mesh import STAGE
from isotrain.core.contracts.plan import Plan, plain_differences
from isotrain.core.errors import IsotrainError
from isotrain.core.json_records import record, value
from isotrain.core.session.checkpointing.checkpoint_save import (
    FORMAT,
    RunIdentity,
    SavedTrainerState,
)
from isotrain.core.spec import import_strings
from isotrain.core.spec.training_spec import TrainingSpec

_MEANING = (
    *("model", "model_args", "loss", "objective", "precision", "seed"),
    *("data", "data_args", "shuffle", "drop_remainder"),
)
"""Fields of the spec without which the state, or the place in the data, means nothing."""
_REFERENCES = ("model", "loss", "objective", "data")
"""Those that name functions."""
_LEFT_OUT = ("name", "loggers", "timeouts", "ignore", "checkpoint", "early_stopping", "on_nan")
"""Fields that do not bear on what is computed."""


@dataclass(frozen=True)
class SavedPlan:
    """What a resume reads of the plan of the run that saved a checkpoint; its names are those of `Plan`."""

    backend: str
    framework: str
    strategy: str
    replicas: int
    global_batch_size: int
    samples: int | None = None
    device_mesh: dict[str, int] = field(default_factory=dict)
    processes: list[dict[str, Any]] = field(default_factory=list)


class SavedRun:
    """What a checkpoint says of the run that saved it.

    Attributes:
        checkpoint: It.
        position: Where the run was.
        identity: Whose it is.
        plan: Of that run.
        strategy_values: What the strategy kept as JSON.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Reads it.

        Raises:
            IsotrainError: It is none that this version of isotrain resumes from.
        """
        where = f"{checkpoint.location}: run.json"
        run = dict(checkpoint.run)
        found = run.pop("format", None)
        if found != FORMAT:
            raise IsotrainError(
                f"{where}: expected `format` {FORMAT}, received {found!r:.60}. Resume it with the isotrain"
                " that wrote it; its `versions` name that."
            )
        self.checkpoint = checkpoint
        self.trainer_state = record(
            SavedTrainerState, run.pop("trainer_state", None), f"{where}: trainer_state"
        )
        values = run.pop("strategy_values", {})
        self.strategy_values = value(dict[str, Any], values, f"{where}: strategy_values")
        self.identity = record(RunIdentity, run, where)
        value(dict[str, Any], self.identity.spec.get("optimizer"), f"{where}: spec: optimizer")
        known = {each.name for each in fields(SavedPlan)}
        plan = {name: part for name, part in self.identity.plan.items() if name in known}
        self.plan = record(SavedPlan, plan, f"{where}: plan")
        self._require_sense(where)

    def _require_sense(self, where: str) -> None:
        """Refuses numbers that no run has had."""
        if self.trainer_state.step != self.checkpoint.step:
            raise IsotrainError(
                f"{where}: trainer_state: it is of step {self.trainer_state.step}, and the checkpoint of step"
                f" {self.checkpoint.step}."
            )
        counts = {"replicas": self.plan.replicas, "global_batch_size": self.plan.global_batch_size}
        counts |= {f"device_mesh.{axis}": size for axis, size in self.plan.device_mesh.items()}
        for name, count in counts.items():
            if count < 1:
                raise IsotrainError(
                    f"{where}: plan: {name}: expected at least 1, received {count}."
                )

    @property
    def stages(self) -> int:
        """In which its replicas lay."""
        return self.plan.device_mesh.get(STAGE, 1)

    @property
    def uses_parameter_server(self) -> bool:
        """Whether a coordinator kept its state."""
        return bool(self.plan.processes) and self.plan.processes[0].get("role") == "coordinator"


def changes(saved: SavedRun, spec: TrainingSpec, plan: Plan) -> list[str]:
    """Says what is another than in the run that saved a checkpoint, of what is computed.

    Raises:
        IsotrainError: The checkpoint means nothing in this run.
    """
    try:
        return _changes(saved, spec, plan)
    except RecursionError:
        where = f"{saved.checkpoint.location}: run.json: spec"
        raise IsotrainError(f"{where}: it is nested too deeply.") from None


def _changes(saved: SavedRun, spec: TrainingSpec, plan: Plan) -> list[str]:
    before, now = saved.identity.spec, spec.to_dict()
    found = [
        each
        for each in plain_differences(before, now)
        if each[0].partition(".")[0] not in _LEFT_OUT
    ]
    # In the plan they are resolved, whichever way the spec gives them.
    found = [each for each in found if each[0] not in ("global_batch_size", "local_batch_size")]
    for name in ("global_batch_size", "samples", "replicas", "backend", "framework"):
        one, other = getattr(saved.plan, name), getattr(plan, name)
        if one != other and None not in (one, other):  # samples are counted once they are loaded
            found.append((name, one, other))
    breaking = [each for each in found if _breaks(*each, before, now)]
    if breaking:
        raise IsotrainError(
            f"{saved.checkpoint.location}: it is of another run, as these differ:\n"
            + "\n".join(f"  {line}" for line in _lines(breaking))
            + "\nGive the spec of the run that saved it. To begin a new run with its weights, name it as"
            " `initial_weights` in the spec."
        )
    return list(_lines(found))


def _breaks(
    name: str, one: Any, other: Any, before: Mapping[str, Any], now: Mapping[str, Any]
) -> bool:
    field = name.partition(".")[0]
    if field in _REFERENCES and import_strings.may_be_one(one, other):
        return False  # only where it is: of a project that was moved, a script that is a module now
    if field == "optimizer":  # its rate and other numbers may change, its slots may not
        kinds = ("name", "custom")
        return any(before[field].get(kind) != now[field].get(kind) for kind in kinds)
    return field in _MEANING or name in ("global_batch_size", "samples")


def _lines(found: Iterable[tuple[str, Any, Any]]) -> Iterable[str]:
    return (
        f"{name}: {one!r:.80} in the checkpoint, {other!r:.80} now" for name, one, other in found
    )
