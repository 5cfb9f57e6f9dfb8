"""Resume check: whether a run can continue from a checkpoint, and what differs from the saved run."""

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

_MUST_MATCH = (
    *("model", "model_args", "call", "loss", "objective", "precision", "seed"),
    *("data", "data_args", "order", "shuffle", "drop_remainder", "epoch_steps"),
)
"""Spec fields that must not change: state, or the position in the data, would lose their meaning."""
_REFERENCES = ("model", "call", "loss", "objective", "data", "order")
"""Spec fields that name functions."""
_IGNORED = (
    "name",
    "backend",
    "loggers",
    "callbacks",
    "gradient_norm",
    "loader",
    "profile",
    "metrics_over_all",
    "timeouts",
    "ignore",
    "checkpoint",
    "early_stopping",
    "on_nan",
    "elastic",
)
"""Spec fields that do not affect what is computed."""
_OTHER_SEEDS = "; the data set's own draws differ, as they are seeded for each sample with a number"


@dataclass(frozen=True)
class SavedPlan:
    """The fields of the saved run's `plan.json` that a resume reads, named as in `Plan`."""

    backend: str
    framework: str
    strategy: str
    replicas: int
    global_batch_size: int
    samples: int | None = None
    device_mesh: dict[str, Any] = field(default_factory=dict)
    processes: list[dict[str, Any]] = field(default_factory=list)


class SavedRun:
    """A checkpoint with its parsed `run.json`.

    Attributes:
        checkpoint: The checkpoint.
        trainer_state: Trainer state of the saved run.
        identity: Spec, plan and package versions of the saved run, as JSON values.
        plan: Plan of the saved run.
        strategy_values: JSON values of the strategy's state.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Parses and validates `run.json`.

        Raises:
            IsotrainError: Its format is not supported, or a value is missing or invalid.
        """
        where = f"{checkpoint.location}: run.json"
        run = dict(checkpoint.run)
        format_number = run.pop("format", None)
        if format_number != FORMAT:
            raise IsotrainError(
                f"{where}: expected `format` {FORMAT}, received {format_number!r:.60}. Resume it with the"
                " isotrain that wrote it; its `versions` name that."
            )
        self.checkpoint = checkpoint
        self.trainer_state = record(
            SavedTrainerState, run.pop("trainer_state", None), f"{where}: trainer_state"
        )
        values = run.pop("strategy_values", {})
        self.strategy_values = value(dict[str, Any], values, f"{where}: strategy_values")
        self.identity = record(RunIdentity, run, where)
        value(dict[str, Any], self.identity.spec.get("optimizer"), f"{where}: spec: optimizer")
        names = {each.name for each in fields(SavedPlan)}
        plan = {name: part for name, part in self.identity.plan.items() if name in names}
        self.plan = record(SavedPlan, plan, f"{where}: plan")
        self._validate(where)

    def _validate(self, where: str) -> None:
        """Refuses impossible numbers."""
        if self.trainer_state.step != self.checkpoint.step:
            raise IsotrainError(
                f"{where}: trainer_state: it is of step {self.trainer_state.step}, and the checkpoint of step"
                f" {self.checkpoint.step}."
            )
        counts = {"replicas": self.plan.replicas, "global_batch_size": self.plan.global_batch_size}
        counts |= {
            f"device_mesh.{axis}{f'[{index}]' if isinstance(size, list) else ''}": count
            for axis, size in self.plan.device_mesh.items()
            for index, count in enumerate(size if isinstance(size, list) else [size])
        }
        for name, count in counts.items():
            if not value(int, count, f"{where}: plan: {name}") >= 1:
                raise IsotrainError(
                    f"{where}: plan: {name}: expected at least 1, received {count}."
                )

    @property
    def stages(self) -> int | list[int]:
        """Number of pipeline stages of the saved run, 1 without; or the number of processes of each."""
        stages: int | list[int] = self.plan.device_mesh.get(STAGE, 1)
        return stages

    @property
    def uses_parameter_server(self) -> bool:
        """Whether the saved run was a parameter-server run."""
        return bool(self.plan.processes) and self.plan.processes[0].get("role") == "coordinator"


def changes(saved: SavedRun, spec: TrainingSpec, plan: Plan) -> list[str]:
    """Lists what differs from the saved run and affects the computation, one line each.

    Raises:
        IsotrainError: A field differs that must not change: the checkpoint belongs to a different run.
    """
    try:
        return _changes(saved, spec, plan)
    except RecursionError:
        where = f"{saved.checkpoint.location}: run.json: spec"
        raise IsotrainError(f"{where}: it is nested too deeply.") from None


def _changes(saved: SavedRun, spec: TrainingSpec, plan: Plan) -> list[str]:
    before, now = saved.identity.spec, spec.to_dict()
    differences = [
        each
        for each in plain_differences(before, now)
        if (each[0].partition(".")[0] not in _IGNORED or _seeds_samples(*each))
        # the plan has the global batch size, whichever of the two the spec gives
        and each[0] not in ("global_batch_size", "local_batch_size")
    ]
    for name in ("global_batch_size", "samples", "replicas", "backend", "framework"):
        old, new = getattr(saved.plan, name), getattr(plan, name)
        if old != new and None not in (old, new):  # samples are counted once they are loaded
            differences.append((name, old, new))
    breaking = [each for each in differences if _breaks(*each, before, now)]
    if breaking:
        raise IsotrainError(
            f"{saved.checkpoint.location}: it is of another run, as these differ:\n"
            + "\n".join(f"  {line}" for line in _lines(breaking))
            + "\nGive the spec of the run that saved it. To begin a new run with its weights, name it as"
            " `initial_weights` in the spec."
        )
    return list(_lines(differences))


def _seeds_samples(name: str, old: Any, new: Any) -> bool:
    """Whether random numbers that the data set draws are seeded for each sample in one of the runs only."""
    return name == "loader.workers" and None in (old, new)


def _breaks(
    name: str, old: Any, new: Any, before: Mapping[str, Any], now: Mapping[str, Any]
) -> bool:
    """Whether a difference means that the checkpoint belongs to a different run."""
    field, *rest = name.split(".")
    if field == "updates":
        old_updates, new_updates = (spec.get(field) or {} for spec in (before, now))
        if old_updates.keys() != new_updates.keys() or rest[1] == "weights":
            return True
        before, now = old_updates[rest[0]], new_updates[rest[0]]
        field = rest[1]
    if field in _REFERENCES and import_strings.may_be_same(old, new):
        return False  # the same function elsewhere: the project was moved, a script became a module
    if field == "optimizer":  # its rate and other numbers may change, its kinds of state may not
        old, new = before[field] or {}, now[field] or {}
        kinds = [(old.get(kind), new.get(kind)) for kind in ("name", "custom")]
        return any(a != b and not import_strings.may_be_same(a, b) for a, b in kinds)
    return field in _MUST_MATCH or name in ("global_batch_size", "samples")


def _lines(differences: Iterable[tuple[str, Any, Any]]) -> Iterable[str]:
    return (
        f"{name}: {old!r:.80} in the checkpoint, {new!r:.80} now"
        + (_OTHER_SEEDS if _seeds_samples(name, old, new) else "")
        for name, old, new in differences
    )
