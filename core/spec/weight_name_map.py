"""Which tensor of one model is which of another: names, and the order of their axes."""

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
    "expected, per framework or backend, a table from the model's own names to common names:"
    ' {tensorflow: {"dense/kernel": fc.weight}}, or to {name: fc.weight, axes: "IO->OI"}'
)


@dataclass(frozen=True)
class MappedTensor:
    """What a model's own tensor is called in common, and how its axes are brought in order.

    Attributes:
        name: The common name.
        axes: Such as `HWIO->OIHW`: own order, common order, one letter an axis. Letters in
            parentheses share an axis: `(HWC)O->O(CHW)`. None for the same order.
        sizes: The length of letters in parentheses; one in each pair of them may be left out.
    """

    name: str
    axes: str | None = None
    sizes: Mapping[str, int] | None = None

    def to_common(self, array: np.ndarray) -> np.ndarray:
        """Brings a tensor in its own order of axes into the common one."""
        return array if self.axes is None else self._rearranged(array, *_sides(self.axes))

    def to_model(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `to_common`."""
        return array if self.axes is None else self._rearranged(array, *_sides(self.axes)[::-1])

    def _rearranged(self, array: np.ndarray, given: list[str], wanted: list[str]) -> np.ndarray:
        if len(given) != array.ndim:
            raise SpecError(
                f"map: {self.name}: axes {self.axes!r} speak of {len(given)} axes where the tensor has"
                f" the shape {tuple(array.shape)}."
            )
        sizes = dict(self.sizes or {})
        for letters, extent in zip(given, array.shape, strict=True):
            self._complete(sizes, letters, extent)
        order = [letter for letters in given for letter in letters]
        open_array = array.reshape([sizes[letter] for letter in order])
        turned = open_array.transpose([order.index(letter) for letter in "".join(wanted)])
        return turned.reshape([math.prod(sizes[letter] for letter in side) for side in wanted])

    def _complete(self, sizes: dict[str, int], letters: str, extent: int) -> None:
        """Works out the one letter of an axis whose length is not given."""
        unknown = [letter for letter in letters if letter not in sizes]
        known = math.prod(sizes[letter] for letter in letters if letter in sizes)
        if len(unknown) == 1 and known and extent % known == 0:
            sizes[unknown[0]] = extent // known
        elif unknown or known != extent:
            raise SpecError(
                f"map: {self.name}: the axis ({letters}) has length {extent}; give `sizes` for its"
                f" letters whose product is that. Given: {dict(self.sizes or {})}."
            )


@dataclass(frozen=True)
class NameMap:
    """From a model's own names to common ones; names that are not in it are common already."""

    targets: Mapping[str, MappedTensor]

    def common(self, name: str) -> str:
        """The common name of a tensor."""
        return self.targets[name].name if name in self.targets else name

    def to_common(self, name: str, array: np.ndarray) -> np.ndarray:
        """A tensor in the common order of axes."""
        return self.targets[name].to_common(array) if name in self.targets else array

    def to_model(self, name: str, array: np.ndarray) -> np.ndarray:
        """A tensor, given in the common order of axes, in the model's own."""
        return self.targets[name].to_model(array) if name in self.targets else array


def map_of(maps: Mapping[str, NameMap], *owners: str) -> NameMap:
    """The map of the first of a backend and its framework that has one; else one that renames nothing."""
    return next((maps[owner] for owner in owners if owner in maps), NameMap({}))


def read_maps(given: MapLike | None) -> dict[str, NameMap]:
    """Reads name maps, by framework or backend, from a mapping or a YAML or JSON file.

    Raises:
        SpecError: The file cannot be read, or the form is wrong.
    """
    if given is None:
        return {}
    fields = _read(Path(given)) if isinstance(given, str | os.PathLike) else given
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
    targets = {str(name): _target(f"{owner}: {name}", given) for name, given in table.items()}
    names = [target.name for target in targets.values()]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise SpecError(f"map: {owner}: more than one tensor becomes {', '.join(double)}.")
    return NameMap(targets)


def _target(where: str, given: Any) -> MappedTensor:
    if isinstance(given, str):
        return MappedTensor(given)
    if not isinstance(given, Mapping) or "name" not in given:
        raise SpecError(f"map: {where}: {_FORM}; received {given!r:.80}.")
    unknown = sorted(set(given) - {"name", "axes", "sizes"})
    if unknown:
        raise SpecError(f"map: {where}: unknown {', '.join(unknown)}; known: name, axes, sizes.")
    target = MappedTensor(**given)
    if target.axes is not None:
        own, common = _sides(target.axes)
        if sorted("".join(own)) != sorted("".join(common)):
            raise SpecError(
                f"map: {where}: axes {target.axes!r} must have the same letters on both sides."
            )
    return target


def _sides(axes: str) -> tuple[list[str], list[str]]:
    """Splits `HWIO->OIHW` into the letters of each axis on both sides."""
    if not re.fullmatch(r"((\w|\(\w+\))+)->((\w|\(\w+\))+)", axes):
        raise SpecError(f'map: axes {axes!r}: expected such as "HWIO->OIHW" or "(HWC)O->O(CHW)".')
    own, common = (re.findall(r"\w|\(\w+\)", side) for side in axes.split("->"))
    return [a.strip("()") for a in own], [a.strip("()") for a in common]


def require_counterparts(own: Sequence[str], common: Sequence[str], names: NameMap) -> None:
    """Checks that every trainable weight of a model is one of the reference's.

    Raises:
        IsotrainError: One is not, or the reference has one that this model lacks.
    """
    translated = {names.common(name) for name in own}
    extra, lacking = sorted(translated - set(common)), sorted(set(common) - translated)
    if extra or lacking:
        raise IsotrainError(
            "the model's weights are not the reference's."
            f" Only here: {', '.join(extra) or 'none'}. Only in the reference:"
            f" {', '.join(lacking) or 'none'}. Say which is which with --map FILE (map= in Python):"
            f" {_FORM}."
        )
