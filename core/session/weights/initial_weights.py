"""The weights that a run starts with, in place of those that its model makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from isotrain.core.contracts.plan import Plan
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.errors import SpecError, UnsupportedError, first_of
from isotrain.core.session.weights.weight_readers import Weights, open_weights, portions
from isotrain.core.session.weights.weights_file import WEIGHTS
from isotrain.core.spec import import_strings
from isotrain.core.spec.initial_weights import InitialWeights, matches
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import NameMap, map_of, read_maps

REPORT_FILE = "initial-weights.json"
_SHOWN = 6


@dataclass(frozen=True)
class LoadReport:
    """What became of the weights that a spec names.

    Attributes:
        source: Where they came from; None where nothing was loaded.
        loaded: Names of the model's weights that were set.
        kept: Those that are as the model made them.
        left_over: Names in the source that no weight of the model has.
        frozen: Names of the model's weights that are not trained.
    """

    source: str | None = None
    loaded: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def notes(self) -> list[str]:
        """In a few lines, for the plan."""
        lines = []
        if self.source is not None:
            total = len(self.loaded) + len(self.kept)
            lines.append(f"{len(self.loaded)} of {total} weights are from {self.source}")
        for names, what in (
            (self.kept if self.source else [], "start as the model makes them"),
            (self.left_over, "of the source are not used"),
            (self.frozen, "are frozen"),
        ):
            if names:
                lines.append(f"{len(names)} {what}: {first_of(names, _SHOWN)}")
        return [f"initial_weights: {line}" for line in lines]


def load_initial_weights(
    spec: TrainingSpec, plan: Plan, group: ReplicaGroup, *, resumes: bool
) -> LoadReport | None:
    """Sets the weights that the spec names, and makes sure that those to freeze are frozen.

    Called by every process, before the first step.

    Args:
        spec: Names them.
        plan: Of the run.
        group: Gets them.
        resumes: Whether a checkpoint with all weights is loaded next: then they are not read.

    Raises:
        SpecError: Names or shapes do not fit, and no pattern says why; or a pattern fits no weight.
        UnsupportedError: The backend trains a weight that is to be frozen.
    """
    wanted = spec.initial_weights
    if wanted is None:
        return None
    known = list(group.describe_state(WEIGHTS))
    _require_fitting("freeze", wanted.freeze, known)
    frozen = [name for name in known if spec.is_frozen(name)]
    _require_frozen(group, frozen, plan.backend)
    if wanted.source is None or resumes:
        return LoadReport(frozen=frozen)
    names = map_of(read_maps(wanted.map), plan.backend, plan.framework)
    source = open_weights(wanted.source, group)
    return _load(wanted, names, source, group, frozen)


def _load(
    wanted: InitialWeights, names: NameMap, source: Weights, group: ReplicaGroup, frozen: list[str]
) -> LoadReport:
    known = group.describe_state(WEIGHTS)
    chosen = [name for name in known if wanted.is_wanted(name)]
    origins = {
        name: _origins(wanted, names, source, (name, *known[name].aliases)) for name in chosen
    }
    present = [name for name in chosen if origins[name]]
    used = {origin for several in origins.values() for origin in several}
    left_over = [name for name in source if name not in used]
    lacking = [n for n in chosen if n not in present and not _is_counter(known[n].dtype)]
    surplus = [n for n in left_over if wanted.is_wanted(n) and not _is_counter(source[n].dtype)]
    _require_counterparts(wanted, lacking, surplus)
    for kind, patterns in (("include", wanted.include), ("exclude", wanted.exclude)):
        _require_fitting(kind, patterns, [*known, *source])
    faults = []
    for portion in portions(present, lambda name: known[name].full_nbytes):
        state = {name: _read(wanted, names, source, name, origins[name]) for name in portion}
        wrong = {name for name in portion if state[name].shape != known[name].shape}
        faults += [f"{n}: {state[n].shape}, here {known[n].shape}" for n in portion if n in wrong]
        group.write_state({name: value for name, value in state.items() if name not in wrong})
    if faults:
        raise SpecError(
            f"initial_weights: shapes in {_called(wanted)} are not those of the model: {'; '.join(faults)}."
            " Leave these weights out with `exclude`, or say with `map` how their axes are ordered."
        )
    loaded = set(present)
    kept = [name for name in known if name not in loaded]
    return LoadReport(_called(wanted), present, kept, left_over, frozen)


def _origins(
    wanted: InitialWeights, names: NameMap, source: Weights, own_names: Sequence[str]
) -> list[str]:
    """What the source has under any name of a weight; under several where both sides have tied weights."""
    first, *aliases = own_names
    common = [names.common(name) for name in (first, *filter(wanted.is_wanted, aliases))]
    return [name for name in dict.fromkeys(common) if name in source]


def _read(
    wanted: InitialWeights, names: NameMap, source: Weights, own: str, origins: Sequence[str]
) -> np.ndarray:
    first, *others = origins
    value = source[first]
    for other in others:
        if not np.array_equal(value, source[other]):
            raise SpecError(
                f"initial_weights: {first} and {other} are one weight of the model, and differ in"
                f" {_called(wanted)}. Leave out with `exclude` the one that is not meant."
            )
    return names.to_model(own, value)


def _is_counter(dtype: str | np.dtype[Any]) -> bool:
    """Whether it is of whole numbers: seeds and counters, which a source may have or not."""
    return "int" in str(dtype)


def _require_counterparts(
    wanted: InitialWeights, lacking: Sequence[str], surplus: Sequence[str]
) -> None:
    if lacking or surplus:
        raise SpecError(
            f"initial_weights: the weights in {_called(wanted)} are not those of the model. Only in the"
            f" model: {', '.join(lacking) or 'none'}. Only in the source: {', '.join(surplus) or 'none'}."
            " Say with `include` or `exclude` which names are meant, or with `map` which is which."
        )


def _require_fitting(field_name: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise SpecError(
                f"initial_weights.{field_name}: {pattern!r} fits none of the names:"
                f" {', '.join(sorted(set(names)))}."
            )


def _require_frozen(group: ReplicaGroup, frozen: Sequence[str], backend: str) -> None:
    trainable = group.describe_state(("trainable",))
    trained = [name for name in frozen if name in trainable]
    if trained:
        raise UnsupportedError(
            f"initial_weights.freeze: backend {backend!r} cannot freeze {first_of(trained, _SHOWN)}."
        )
    if not trainable:
        raise SpecError("initial_weights.freeze: every weight is frozen; nothing is left to train.")


def _called(wanted: InitialWeights) -> str:
    return import_strings.describe(wanted.source)
