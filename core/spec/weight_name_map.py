"""Maps of weight names between models of two frameworks, and the order of the weights' axes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isotrain.core.errors import IsotrainError, SpecError

if TYPE_CHECKING:
    import numpy as np

MapLike = Mapping[str, Any] | str | os.PathLike[str]
_FORM = (
    "expected, per framework or backend, a table from the model's names to common names:"
    ' {tensorflow: {"dense/kernel": fc.weight}}, or to {name: fc.weight, axes: "IO->OI"}'
)


@dataclass(frozen=True)
class MappedTensor:
    """Common name of a model's tensor, and the conversion of its axes to the common order.

    Attributes:
        name: Common name.
        axes: Axis orders such as `HWIO->OIHW`: the model's and the common one, one letter per axis.
            Letters in parentheses share an axis: `(HWC)O->O(CHW)`. None for equal orders.
        sizes: Lengths of letters in parentheses; one of each pair of parentheses may be left out.
    """

    name: str
    axes: str | None = None
    sizes: Mapping[str, int] | None = None

    def to_common(self, array: np.ndarray) -> np.ndarray:
        """Converts an array from the model's axis order to the common one; any dtype."""
        return array if self.axes is None else self._rearrange(array, *_sides(self.axes))

    def to_model(self, array: np.ndarray) -> np.ndarray:
        """Inverse of `to_common`: an array of the model's shape, any dtype."""
        return array if self.axes is None else self._rearrange(array, *_sides(self.axes)[::-1])

    def _rearrange(self, array: np.ndarray, source: list[str], target: list[str]) -> np.ndarray:
        """Splits, permutes and merges axes of an array: shape by the axes `source` to shape by `target`.

        Raises:
            SpecError: The letters do not fit the array's axes.
        """
        if len(source) != array.ndim:
            raise SpecError(
                f"map: {self.name}: axes {self.axes!r} name {len(source)} axes, but the tensor has"
                f" the shape {tuple(array.shape)}."
            )
        sizes = dict(self.sizes or {})
        for letters, extent in zip(source, array.shape, strict=True):
            self._complete_sizes(sizes, letters, extent)
        order = [letter for letters in source for letter in letters]
        split = array.reshape([sizes[letter] for letter in order])
        transposed = split.transpose([order.index(letter) for letter in "".join(target)])
        return transposed.reshape([math.prod(sizes[letter] for letter in side) for side in target])

    def _complete_sizes(self, sizes: dict[str, int], letters: str, extent: int) -> None:
        """Computes the length of the one letter of an axis that has none."""
        missing = [letter for letter in letters if letter not in sizes]
        product = math.prod(sizes[letter] for letter in letters if letter in sizes)
        if len(missing) == 1 and product and extent % product == 0:
            sizes[missing[0]] = extent // product
        elif missing or product != extent:
            raise SpecError(
                f"map: {self.name}: the axis ({letters}) has length {extent}; give `sizes` for its"
                f" letters whose product is that. Received: {dict(self.sizes or {})}."
            )


@dataclass(frozen=True)
class NameMap:
    """Map from a model's weight names to common names; missing names are equal in both.

    Attributes:
        targets: Weight name in the model to its common name and axes.
    """

    targets: Mapping[str, MappedTensor]

    def common(self, name: str) -> str:
        """Common name of a tensor."""
        return self.targets[name].name if name in self.targets else name

    def to_common(self, name: str, array: np.ndarray) -> np.ndarray:
        """Array of a tensor, any shape and dtype, converted from the model's axis order to the common one."""
        return self.targets[name].to_common(array) if name in self.targets else array

    def to_model(self, name: str, array: np.ndarray) -> np.ndarray:
        """Array of a tensor, any shape and dtype, converted from the common axis order to the model's."""
        return self.targets[name].to_model(array) if name in self.targets else array


def map_of(maps: Mapping[str, NameMap], *owners: str) -> NameMap:
    """Map of the first owner (backend, framework) that has one; else an empty map."""
    return next((maps[owner] for owner in owners if owner in maps), NameMap({}))


def read_maps(source: MapLike | None) -> dict[str, NameMap]:
    """Reads name maps from a mapping or a YAML or JSON file; returns framework or backend to map.

    Raises:
        SpecError: The file cannot be read, or the map is invalid.
    """
    if source is None:
        return {}
    fields = _read(Path(source)) if isinstance(source, str | os.PathLike) else source
    if not isinstance(fields, Mapping):
        raise SpecError(f"map: {_FORM}; received {type(fields).__name__}.")
    return {str(owner): _name_map(str(owner), table) for owner, table in fields.items()}


def _read(path: Path) -> Any:
    from isotrain.core.spec import yaml_loader

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml_loader.load(text)
    except (OSError, ValueError, RecursionError, yaml_loader.TextError) as error:
        raise SpecError(f"map: {path} cannot be read: {error}") from error


def _name_map(owner: str, table: Any) -> NameMap:
    if not isinstance(table, Mapping):
        raise SpecError(f"map: {owner}: {_FORM}; received {table!r:.80}.")
    targets = {str(name): _target(f"{owner}: {name}", target) for name, target in table.items()}
    names = [target.name for target in targets.values()]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise SpecError(f"map: {owner}: more than one tensor becomes {', '.join(duplicates)}.")
    return NameMap(targets)


def _target(entry: str, value: Any) -> MappedTensor:
    if isinstance(value, str):
        return MappedTensor(value)
    if not isinstance(value, Mapping) or "name" not in value:
        raise SpecError(f"map: {entry}: {_FORM}; received {value!r:.80}.")
    unknown = sorted(set(value) - {"name", "axes", "sizes"})
    if unknown:
        raise SpecError(f"map: {entry}: unknown {', '.join(unknown)}; known: name, axes, sizes.")
    target = MappedTensor(**value)
    if target.axes is not None:
        model_axes, common_axes = _sides(target.axes)
        if sorted("".join(model_axes)) != sorted("".join(common_axes)):
            raise SpecError(
                f"map: {entry}: axes {target.axes!r} must have the same letters on both sides."
            )
    return target


def _sides(axes: str) -> tuple[list[str], list[str]]:
    """Splits `HWIO->OIHW` into the letters of each axis on both sides."""
    if not re.fullmatch(r"((\w|\(\w+\))+)->((\w|\(\w+\))+)", axes):
        raise SpecError(f'map: axes {axes!r}: expected such as "HWIO->OIHW" or "(HWC)O->O(CHW)".')
    model_axes, common_axes = (re.findall(r"\w|\(\w+\)", side) for side in axes.split("->"))
    return [each.strip("()") for each in model_axes], [each.strip("()") for each in common_axes]


def require_counterparts(
    names: Sequence[str], reference_names: Sequence[str], name_map: NameMap
) -> None:
    """Checks that a model and a reference model, with common names, have the same trainable weights.

    Raises:
        IsotrainError: Either has a weight that the other lacks.
    """
    common = {name_map.common(name) for name in names}
    extra, missing = sorted(common - set(reference_names)), sorted(set(reference_names) - common)
    if extra or missing:
        raise IsotrainError(
            "the model's weights are not the reference's."
            f" Only here: {', '.join(extra) or 'none'}. Only in the reference:"
            f" {', '.join(missing) or 'none'}. Map the names with --map FILE (map= in Python):"
            f" {_FORM}."
        )
