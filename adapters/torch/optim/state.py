"""The state of a torch optimizer by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.base.tensors import local_shard, overwrite
from isotrain.plugin import IsotrainError, unknown_name

_NUMBERS = (bool, int, float)
_WITHOUT = "without_slots"
_GROUPS = "groups/"


class NativeOptimizerState:
    """`WEIGHT/SLOT` for each slot, most of which the first update makes.

    Where a weight has none yet, `without_slots` has a flag for each weight: written, it takes slots away.
    A person's own optimizer may keep numbers for a group of weights as well: `groups/GROUP/NUMBER`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Mapping[str, Any],
        updated: Collection[str],
        is_own: bool,
    ) -> None:
        """Names what there is, now and later.

        Args:
            optimizer: Any of torch.
            weights: All that are trained, by name.
            updated: The names of those that it updates.
            is_own: Whether it is a person's own.
        """
        self._optimizer = optimizer
        self._all = weights
        self._weights = {name: weight for name, weight in weights.items() if name in updated}
        self._is_own = is_own

    @property
    def is_partial(self) -> bool:
        """Whether others update some of the weights."""
        return len(self._weights) < len(self._all)

    def is_remote_slot(self, name: str) -> bool:
        """Whether a slot is of a weight that others update."""
        owner = name.rpartition("/")[0]
        return owner in self._all and owner not in self._weights

    def read(self) -> dict[str, torch.Tensor]:
        """All of it."""
        found = {
            f"{name}/{slot}": _as_tensor(value)
            for name, weight in self._weights.items()
            for slot, value in self._of(weight).items()
            if isinstance(value, torch.Tensor | bool | int | float)
        }
        without = [not self._of(weight) for weight in self._weights.values()]
        if any(without) and not self.is_partial:  # each replica would say another thing
            found[_WITHOUT] = torch.tensor(without)
        return found | {name: _as_tensor(group[key]) for name, group, key in self._numbers()}

    def _of(self, weight: nn.Parameter) -> dict[str, Any]:
        slots: dict[str, Any] = self._optimizer.state.get(weight, {})
        return slots

    def _numbers(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Names, and where their numbers are."""
        for place, group in enumerate(self._optimizer.param_groups if self._is_own else ()):
            for key, value in group.items():
                if isinstance(value, _NUMBERS) and key != "lr":
                    yield f"{_GROUPS}{place}/{key}", group, key

    def write(self, name: str, value: torch.Tensor) -> None:
        """Sets one, which need not exist yet.

        Raises:
            IsotrainError: It is of no weight of this model, of another shape, or not of this optimizer.
        """
        owner, _, slot = name.rpartition("/")
        if name == _WITHOUT:
            self._take_away(value)
        elif owner in self._weights:
            self._write_slot(self._weights[owner], slot, f"optimizer/{name}", value)
        elif name.startswith(_GROUPS):
            self._write_number(name, value)
        else:
            raise IsotrainError(unknown_name("weight", owner, self._weights))

    def _take_away(self, without: torch.Tensor) -> None:
        for weight, flag in zip(self._all.values(), without.tolist(), strict=True):
            if flag:
                self._optimizer.state.pop(weight, None)

    def _write_slot(self, weight: nn.Parameter, slot: str, name: str, value: torch.Tensor) -> None:
        if not self._is_own and not self._of(weight):
            self.make([weight])
        slots = self._optimizer.state[weight]
        known = slots.get(slot)
        if torch.is_tensor(known):
            overwrite(name, known, value)
        elif not self._is_own:
            raise IsotrainError(unknown_name("slot", name, slots))
        elif isinstance(known, _NUMBERS) or self._is_number(value):
            slots[slot] = value.item()
        elif value.is_floating_point() and value.shape in (weight.shape, local_shard(weight).shape):
            slots[slot] = torch.zeros_like(weight)
            overwrite(name, slots[slot], value)
        else:
            slots[slot] = value if slot == "step" else value.to(weight.device)

    def _is_number(self, value: torch.Tensor) -> bool:
        """Whether a slot that is not there yet is a Python number."""
        return not value.dim() and value.dtype in (torch.int64, torch.float64)

    def _write_number(self, name: str, value: torch.Tensor) -> None:
        numbers = {known: (group, key) for known, group, key in self._numbers()}
        if name not in numbers:
            raise IsotrainError(unknown_name("state", f"optimizer/{name}", numbers))
        group, key = numbers[name]
        group[key] = type(group[key])(value.item())

    def not_checkpointed(self) -> list[str]:
        """The slots that are neither tensors nor numbers."""
        kinds = (torch.Tensor, *_NUMBERS, type(None))
        return sorted(
            {
                slot
                for weight in self._weights.values()
                for slot, value in self._of(weight).items()
                if not isinstance(value, kinds)
            }
        )

    def make(self, weights: Iterable[nn.Parameter] | None = None) -> None:
        """Makes, as zeros, the slots that torch makes at a weight's first update.

        Without them, replicas of which some have not updated yet would read vectors of other lengths.

        Args:
            weights: Those that get theirs; all when left out.
        """
        wanted = self._weights.values() if weights is None else weights
        without = [weight for weight in wanted if not self._of(weight)]
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
                for slot in self._of(weight).values():
                    if torch.is_tensor(slot):
                        slot.zero_()
        for weight, gradient in zip(self._weights.values(), gradients, strict=True):
            weight.grad = gradient


def _as_tensor(value: Any) -> torch.Tensor:
    """A tensor as it is; a number in a type that loses nothing of it."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return value if torch.is_tensor(value) else torch.tensor(value)
