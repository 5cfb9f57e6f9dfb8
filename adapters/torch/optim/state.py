"""Named state of a torch optimizer, for checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.base.tensors import local_shard, overwrite
from isotrain.plugin import IsotrainError, unknown_name

_NUMBER_TYPES = (bool, int, float)
_WITHOUT_SLOTS = "without_slots"
_GROUPS = "groups/"
_LIST = "[]"


class NativeOptimizerState:
    """State of a torch optimizer by name.

    | name | value |
    |---|---|
    | `WEIGHT/SLOT` | slot of a weight, such as `exp_avg`; the first update creates most slots |
    | `WEIGHT/SLOT[]` | slot that is a list of tensors of one shape, stacked, as L-BFGS has them |
    | `without_slots` | bool per weight, if some have no slots yet; written, it removes slots |
    | `groups/INDEX/OPTION` | number in a parameter group of a custom optimizer, except `lr` |
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, Any],
        updated: Collection[str],
        is_custom: bool,
        slots: Collection[str] = (),
    ) -> None:
        """Wraps an optimizer.

        Args:
            optimizer: Optimizer of torch, or a custom one.
            weights: All trained parameters (or their shards), by name.
            updated: Names of the parameters that this optimizer updates.
            is_custom: Whether it is a custom optimizer.
            slots: Slots of the optimizer. A value for a weight whose group has options without its slot is
                not taken.
        """
        self._optimizer = optimizer
        self._all = weights
        self._weights = {name: weight for name, weight in weights.items() if name in updated}
        self._is_custom = is_custom
        self._known_slots = slots

    @property
    def is_partial(self) -> bool:
        """Whether other ranks update some of the weights (ZeRO stages 1 and 2)."""
        return len(self._weights) < len(self._all)

    def is_remote_slot(self, name: str) -> bool:
        """Whether a slot belongs to a weight that another rank updates."""
        owner = name.rpartition("/")[0]
        return owner in self._all and owner not in self._weights

    def read(self) -> dict[str, torch.Tensor]:
        """All state by name; Python numbers as scalar tensors."""
        state = {
            f"{name}/{slot}{_LIST if isinstance(value, list) else ''}": _as_tensor(value)
            for name, weight in self._weights.items()
            for slot, value in self._kept_slots(weight)
            if isinstance(value, torch.Tensor | bool | int | float) or _is_tensor_list(value)
        }
        without = [not self._slots(weight) for weight in self._weights.values()]
        if any(without) and not self.is_partial:  # replicas would differ
            state[_WITHOUT_SLOTS] = torch.tensor(without)
        return state | {name: _as_tensor(group[key]) for name, group, key in self._numbers()}

    def _slots(self, weight: nn.Parameter) -> dict[str, Any]:
        """Optimizer state of a weight by slot: tensors of its shape, scalars or numbers."""
        slots: dict[str, Any] = self._optimizer.state.get(weight, {})
        return slots

    def _kept_slots(self, weight: nn.Parameter) -> Iterator[tuple[str, Any]]:
        """Slots that checkpoints hold: not the list that L-BFGS fills anew in each update."""
        is_lbfgs = isinstance(self._optimizer, torch.optim.LBFGS)
        return (each for each in self._slots(weight).items() if not (is_lbfgs and each[0] == "al"))

    def _numbers(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Name, parameter group and key of each number in the groups."""
        for index, group in enumerate(self._optimizer.param_groups if self._is_custom else ()):
            for key, value in group.items():
                if isinstance(value, _NUMBER_TYPES) and key != "lr":
                    yield f"{_GROUPS}{index}/{key}", group, key

    def write(self, name: str, value: torch.Tensor) -> None:
        """Overwrites or creates one entry of the state.

        Raises:
            IsotrainError: The weight, its shape or the slot does not exist here.
        """
        owner, _, slot = name.rpartition("/")
        if name == _WITHOUT_SLOTS:
            self._remove_slots(value)
        elif owner in self._weights:
            self._write_slot(self._weights[owner], slot, f"optimizer/{name}", value)
        elif name.startswith(_GROUPS):
            self._write_number(name, value)
        else:
            raise IsotrainError(unknown_name("weight", owner, self._weights))

    def _remove_slots(self, without: torch.Tensor) -> None:
        """Removes the slots of the flagged weights; bool, shape `[weights]`."""
        for weight, flag in zip(self._all.values(), without.tolist(), strict=True):
            if flag:
                self._optimizer.state.pop(weight, None)

    def _write_slot(self, weight: nn.Parameter, slot: str, name: str, value: torch.Tensor) -> None:
        """Overwrites one slot of a weight, by a value of the weight's or its shard's shape or a scalar."""
        if not self._is_custom and not self._slots(weight):
            self.make([weight])
        slots = self._optimizer.state[weight]
        if self._is_custom and slot.endswith(_LIST):
            parts = value.to(weight.device).unbind()
            # copies, whose alignment is that of the originals: sums are rounded by it
            slots[slot.removesuffix(_LIST)] = [part.clone() for part in parts]
            return
        current = slots.get(slot)
        if torch.is_tensor(current):
            overwrite(name, current, value)
        elif not self._is_custom:
            if slot not in self._known_slots:
                raise IsotrainError(unknown_name("slot", name, slots))
        elif isinstance(current, _NUMBER_TYPES) or self._is_number(value):
            slots[slot] = value.item()
        elif value.is_floating_point() and value.shape in (weight.shape, local_shard(weight).shape):
            slots[slot] = torch.zeros_like(weight)
            overwrite(name, slots[slot], value)
        else:
            slots[slot] = value if slot == "step" else value.to(weight.device)

    def _is_number(self, value: torch.Tensor) -> bool:
        """Whether the value of a missing slot was a Python number: an int64 or float64 scalar."""
        return not value.dim() and value.dtype in (torch.int64, torch.float64)

    def _write_number(self, name: str, value: torch.Tensor) -> None:
        """Overwrites a number of a parameter group by a scalar."""
        numbers = {number: (group, key) for number, group, key in self._numbers()}
        if name not in numbers:
            raise IsotrainError(unknown_name("state", f"optimizer/{name}", numbers))
        group, key = numbers[name]
        group[key] = type(group[key])(value.item())

    def not_checkpointed(self) -> list[str]:
        """Names of slots that are neither tensors nor numbers."""
        types = (torch.Tensor, *_NUMBER_TYPES, type(None))
        return sorted(
            {
                slot
                for weight in self._weights.values()
                for slot, value in self._kept_slots(weight)
                if not isinstance(value, types) and not _is_tensor_list(value)
            }
        )

    def make(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """Creates, as zeros, the slots that torch creates at a weight's first update, by such an update.

        Without them, replicas would read vectors of different lengths if some have not updated yet.

        Args:
            weights: Parameters that get slots; None for all.
        """
        requested = self._weights.values() if weights is None else weights
        without = [weight for weight in requested if not self._slots(weight)]
        if not without:
            return
        gradients = [weight.grad for weight in self._weights.values()]
        before = [weight.detach().clone() for weight in without]
        for weight in self._weights.values():
            weight.grad = None
        for weight in without:
            weight.grad = torch.zeros_like(weight)
        self._optimizer.step()
        with torch.no_grad():
            for weight, value in zip(without, before, strict=True):
                weight.copy_(value)
                for slot in self._slots(weight).values():
                    if torch.is_tensor(slot):
                        slot.zero_()
        for weight, gradient in zip(self._weights.values(), gradients, strict=True):
            weight.grad = gradient


def _as_tensor(value: Any) -> torch.Tensor:
    """A tensor unchanged, a list stacked; a Python number as an exact scalar: float64, int64 or bool."""
    if isinstance(value, list):
        return torch.stack(value) if value else torch.zeros(0)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return value if torch.is_tensor(value) else torch.tensor(value)


def _is_tensor_list(value: Any) -> bool:
    """Whether a slot is a list of tensors."""
    return isinstance(value, list) and all(map(torch.is_tensor, value))
