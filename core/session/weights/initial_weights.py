"""Initial weights: loading the weights that a spec names into the model, and checking frozen ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.plan import Plan
from isotrain.core.errors import SpecError, UnsupportedError, first_of
from isotrain.core.session.weights.weight_readers import Weights, open_weights, portions
from isotrain.core.session.weights.weights_file import WEIGHTS
from isotrain.core.spec import import_strings
from isotrain.core.spec.initial_weights import InitialWeights, matches
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import NameMap, map_of, read_maps

REPORT_FILE = "initial-weights.json"
_MAX_LISTED = 6


@dataclass(frozen=True)
class LoadReport:
    """Report on the initial weights of a run.

    Attributes:
        source: Description of the source; None where nothing was loaded.
        loaded: Names of the model's weights that were loaded.
        kept: Names of the model's weights that keep their initialization.
        left_over: Names in the source that were not used.
        frozen: Names of the model's weights that are not trained.
    """

    source: str | None = None
    loaded: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)

    def notes(self) -> list[str]:
        """The report in a few lines, for the plan."""
        lines = []
        if self.source is not None:
            total = len(self.loaded) + len(self.kept)
            lines.append(f"{len(self.loaded)} of {total} weights are from {self.source}")
        for names, text in (
            (self.kept if self.source else [], "start as the model makes them"),
            (self.left_over, "of the source are not used"),
            (self.frozen, "are frozen"),
        ):
            if names:
                lines.append(f"{len(names)} {text}: {first_of(names, _MAX_LISTED)}")
        return [f"initial_weights: {line}" for line in lines]


def load_initial_weights(
    spec: TrainingSpec, plan: Plan, group: ReplicaGroup, *, resumes: bool
) -> LoadReport | None:
    """Loads the initial weights of the spec, and checks that weights to freeze are frozen.

    Collective, before the first step. With `resumes` a checkpoint is loaded next, and the source is not read.

    Returns:
        The report; None where the spec has no `initial_weights`.

    Raises:
        SpecError: Names or shapes of source and model differ, or a pattern matches no weight.
        UnsupportedError: The backend trains a weight that is to be frozen.
    """
    options = spec.initial_weights
    if options is None:
        return None
    weights = list(group.describe_state(WEIGHTS))
    _require_matches("freeze", options.freeze, weights)
    frozen = [name for name in weights if spec.is_frozen(name)]
    _require_frozen(group, frozen, plan.backend)
    if options.source is None or resumes:
        return LoadReport(frozen=frozen)
    name_map = map_of(read_maps(options.map), plan.backend, plan.framework)
    source = open_weights(options.source, group)
    return _load(options, name_map, source, group, frozen)


def _load(
    options: InitialWeights,
    name_map: NameMap,
    source: Weights,
    group: ReplicaGroup,
    frozen: list[str],
) -> LoadReport:
    infos = group.describe_state(WEIGHTS)
    selected = [name for name in infos if options.is_wanted(name)]
    source_names = {
        name: _source_names(options, name_map, source, (name, *infos[name].aliases))
        for name in selected
    }
    present = [name for name in selected if source_names[name]]
    used = {source_name for several in source_names.values() for source_name in several}
    left_over = [name for name in source if name not in used]
    missing = [n for n in selected if n not in present and not _is_integer(infos[n].dtype)]
    surplus = [n for n in left_over if options.is_wanted(n) and not _is_integer(source[n].dtype)]
    _require_counterparts(options, missing, surplus)
    for kind, patterns in (("include", options.include), ("exclude", options.exclude)):
        _require_matches(kind, patterns, [*infos, *source])
    mismatches = []
    for portion in portions(present, lambda name: infos[name].full_nbytes):
        state = {
            name: _read(options, name_map, source, name, source_names[name]) for name in portion
        }
        wrong = {name for name in portion if state[name].shape != infos[name].shape}
        mismatches += [
            f"{n}: {state[n].shape}, here {infos[n].shape}" for n in portion if n in wrong
        ]
        group.write_state({name: value for name, value in state.items() if name not in wrong})
    if mismatches:
        raise SpecError(
            f"initial_weights: shapes in {_source_text(options)} are not those of the model:"
            f" {'; '.join(mismatches)}. Leave these weights out with `exclude`, or say with `map` how their"
            " axes are ordered."
        )
    loaded = set(present)
    kept = [name for name in infos if name not in loaded]
    return LoadReport(_source_text(options), present, kept, left_over, frozen)


def _source_names(
    options: InitialWeights, name_map: NameMap, source: Weights, names: Sequence[str]
) -> list[str]:
    """Names of a weight in the source, from all its names in the model; several for tied weights."""
    first, *aliases = names
    common = [name_map.common(name) for name in (first, *filter(options.is_wanted, aliases))]
    return [name for name in dict.fromkeys(common) if name in source]


def _read(
    options: InitialWeights,
    name_map: NameMap,
    source: Weights,
    name: str,
    source_names: Sequence[str],
) -> np.ndarray:
    """Reads a weight from the source, with the shape and axis order that the model has."""
    first, *others = source_names
    value = source[first]
    for other in others:
        if not np.array_equal(value, source[other]):
            raise SpecError(
                f"initial_weights: {first} and {other} are one weight of the model, and differ in"
                f" {_source_text(options)}. Leave out with `exclude` the one that is not meant."
            )
    return name_map.to_model(name, value)


def _is_integer(dtype: str | np.dtype[Any]) -> bool:
    """Whether a tensor is a seed or counter, which a source may have or not."""
    return "int" in str(dtype)


def _require_counterparts(
    options: InitialWeights, missing: Sequence[str], surplus: Sequence[str]
) -> None:
    if missing or surplus:
        raise SpecError(
            f"initial_weights: the weights in {_source_text(options)} are not those of the model. Only in"
            f" the model: {', '.join(missing) or 'none'}. Only in the source: {', '.join(surplus) or 'none'}."
            " Say with `include` or `exclude` which names are meant, or with `map` which is which."
        )


def _require_matches(field_name: str, patterns: Sequence[str], names: Sequence[str]) -> None:
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
            f"initial_weights.freeze: backend {backend!r} cannot freeze {first_of(trained, _MAX_LISTED)}."
        )
    if not trainable:
        raise SpecError("initial_weights.freeze: every weight is frozen; nothing is left to train.")


def _source_text(options: InitialWeights) -> str:
    return import_strings.describe(options.source)
