"""Optimizer options of each weight: groups of weights by patterns of names, and layer-wise rates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isotrain.core.errors import SpecError, first_of
from isotrain.core.quantities import counted
from isotrain.core.spec.initial_weights import matches

_MAX_NAMES = 20
"""Number of names that an error lists."""


@dataclass(frozen=True)
class GroupOptions:
    """Optimizer options of some weights, where they differ from those of the spec's optimizer.

    Attributes:
        lr_factor: What the learning rate of a step is multiplied by.
        options: Other options of the optimizer, by their names in the spec; those that add a slot for some
            group alone are given for all weights.
        group: Index in `optimizer.groups`; None for weights that are in no group.
        schedule: The same index if that group has a schedule, which gives the rate; None: the run's gives it.
    """

    lr_factor: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    group: int | None = None
    schedule: int | None = None

    @property
    def key(self) -> Hashable:
        """Key that is equal for weights that can be updated together."""
        return self.lr_factor, self.schedule, tuple(sorted(self.options.items()))


def options_by_weight(optimizer: Any, names: Sequence[str]) -> dict[str, GroupOptions]:
    """Optimizer options of each weight, by name.

    Args:
        optimizer: Optimizer section of the spec.
        names: Names of all trainable weights, in the order of the model.

    Raises:
        SpecError: A pattern fits no weight, or a weight is in none of the layers.
    """
    for index, group in enumerate(optimizer.groups):
        require_match(f"optimizer.groups[{index}].weights", group.weights, names)
    layer_factors = _layer_factors(optimizer.layer_decay, names)
    return {name: _options(optimizer, name, layer_factors[name]) for name in names}


def _options(optimizer: Any, name: str, layer_factor: float) -> GroupOptions:
    """Options of a weight: those of the first group that fits its name."""
    if not optimizer.groups:
        return GroupOptions(layer_factor)
    common = {option: getattr(optimizer, option) for option in optimizer.slot_options_of_groups}
    for index, group in enumerate(optimizer.groups):
        if matches(name, group.weights):
            factor = group.lr_factor * layer_factor
            schedule = index if group.schedule else None
            return GroupOptions(factor, {**common, **group.options}, index, schedule)
    return GroupOptions(layer_factor, common)


def require_match(where: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Checks that each of the patterns of a field `where` fits one of the trainable weights.

    Raises:
        SpecError: One fits none.
    """
    for pattern in patterns:
        if not any(matches(name, (pattern,)) for name in names):
            raise SpecError(
                f"{where}: {pattern!r} fits none of the trainable weights, which are"
                f" {first_of([*names], _MAX_NAMES) or 'none'}."
            )


def _layer_factors(layer_decay: Any, names: Sequence[str]) -> dict[str, float]:
    """Rate factor of each weight: the decay to the power of the number of layers that follow its layer."""
    if layer_decay is None:
        return dict.fromkeys(names, 1.0)
    if layer_decay.layers:
        layers = [_layer_of_patterns(name, layer_decay.layers) for name in names]
        for index, patterns in enumerate(layer_decay.layers):
            require_match(f"optimizer.layer_decay.layers[{index}]", patterns, names)
        depth = len(layer_decay.layers)
    else:
        order = {layer: index for index, layer in enumerate(dict.fromkeys(map(layer_name, names)))}
        layers = [order[layer_name(name)] for name in names]
        depth = len(order)
    return {
        name: layer_decay.factor ** (depth - 1 - layer)
        for name, layer in zip(names, layers, strict=True)
    }


def _layer_of_patterns(name: str, layers: Sequence[Sequence[str]]) -> int:
    for index, patterns in enumerate(layers):
        if matches(name, patterns):
            return index
    raise SpecError(f"optimizer.layer_decay.layers: no layer has the trainable weight {name!r}.")


def layer_name(name: str) -> str:
    """Layer of a weight: its name up to the first part that is a number, else up to the weight's own part.

    So `blocks.3.attn.qkv.weight` is in layer `blocks.3`, and `stem/conv/kernel` in `stem/conv`.
    """
    parts = name.replace("/", ".").split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name


@dataclass(frozen=True)
class WeightGroup:
    """Weights with equal optimizer options.

    Attributes:
        lr_factor: What the learning rate of a step is multiplied by.
        options: Other options of the optimizer, by their names in the spec.
        indices: Indices of the weights among those that were grouped.
        schedule: Index in `optimizer.groups` of the group whose schedule gives the rate; None: the run's
            gives it.
    """

    lr_factor: float
    options: Mapping[str, Any]
    indices: tuple[int, ...]
    schedule: int | None = None

    @property
    def has_spec_options(self) -> bool:
        """Whether the group has the options of the spec's optimizer alone."""
        return self.lr_factor == 1.0 and self.schedule is None and not self.options


def weight_groups(
    optimizer: Any, names: Sequence[str], updated: Sequence[str] | None = None
) -> list[WeightGroup]:
    """Groups of weights with equal options, in the order of their first weights.

    Args:
        optimizer: Optimizer section of the spec.
        names: Names of all trainable weights, in the order of the model.
        updated: Names of the weights to group, such as those that one replica updates; None for all.

    Raises:
        SpecError: A pattern fits no weight, or a weight is in none of the layers.
    """
    options = options_by_weight(optimizer, names)
    groups: dict[Hashable, list[int]] = {}
    updated = names if updated is None else updated
    for index, name in enumerate(updated):
        groups.setdefault(options[name].key, []).append(index)
    return [
        WeightGroup(first.lr_factor, first.options, tuple(indices), first.schedule)
        for indices in groups.values()
        for first in [options[updated[indices[0]]]]
    ]


def group_notes(optimizer: Any, names: Sequence[str]) -> list[str]:
    """Notes for the plan: how many weights each group has, and the rates of the layers.

    Args:
        optimizer: Optimizer section of the spec.
        names: Names of all trainable weights, in the order of the model.

    Raises:
        SpecError: A pattern fits no weight, or a weight is in none of the layers.
    """
    options = options_by_weight(optimizer, names)
    notes = []
    if optimizer.groups:
        counts = [
            f"{counted(sum(each.group == index for each in options.values()), 'weight')}"
            f" ({', '.join(group.weights)}{_schedule_note(group)})"
            for index, group in enumerate(optimizer.groups)
        ]
        others = sum(each.group is None for each in options.values())
        notes.append(f"optimizer.groups: {'; '.join(counts)}; {others} in no group")
    if optimizer.layer_decay is not None:
        factors = list(_layer_factors(optimizer.layer_decay, names).values())
        notes.append(
            f"optimizer.layer_decay: the rates of {counted(len(set(factors)), 'layer')} are"
            f" {min(factors):.3g} to {max(factors):.3g} times that of the step"
        )
    return notes


def _schedule_note(group: Any) -> str:
    return f"; schedule {group.schedule.name}" if group.schedule else ""
