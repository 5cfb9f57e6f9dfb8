"""Refused captures, guards on Python state, and perturbations that scale tolerances."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from isotrain.adapters.torch.base.pytree import rolled
from isotrain.adapters.torch.graph.guards.containers import mutable_containers_in, refill
from isotrain.adapters.torch.graph.traceability import (
    CALLED_BY_VMAP,
    VALUE_DEPENDENT,
    ForbidValueReads,
    UncapturableError,
    require_fixed_shapes,
)
from isotrain.adapters.torch.graph.verify import Outcome, perturbed, perturbed_weights

Compute = Callable[[torch.Tensor], Any]
LEAVING: dict[str, Compute] = {
    "numpy": lambda x: (x * 2).detach().numpy(),
    "asarray": np.asarray,
    "tolist": lambda x: x.tolist(),
    "data": lambda x: x.data * 2,
    "deepcopy": copy.deepcopy,
    "from_dlpack": np.from_dlpack,
}
SHAPED: dict[str, Compute] = {
    "nonzero": lambda x: x * len(torch.nonzero(x)),
    "where": lambda x: torch.where(x > 2)[0],
    "index": lambda x: x[x > 2],
    "masked_select": lambda x: x.masked_select(x > 2),
    "_unique2": torch.unique,
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x.long()),
}
KEPT: dict[str, Compute] = {
    "constant": lambda x: x * torch.tensor([3, 4]).tolist()[0],
    "constant shape": lambda x: x * len(torch.nonzero(torch.tensor([0, 1]))),
    "index": lambda x: x[x.long() % 2],
    "repeated": lambda x: torch.repeat_interleave(x, torch.tensor([2])),
    "one-hot": lambda x: torch.nn.functional.one_hot(x.long(), 8),
}


def recorded(compute: Compute) -> torch.fx.GraphModule:
    def watched(given: torch.Tensor) -> Any:
        with ForbidValueReads():
            return compute(given)

    module = make_fx(watched, pre_dispatch=True)(torch.arange(6.0))
    require_fixed_shapes(module.graph)
    return module


@pytest.mark.parametrize("name", LEAVING)
def test_values_that_leave_torch_are_refused(name: str) -> None:
    with pytest.raises(UncapturableError, match=VALUE_DEPENDENT):
        recorded(LEAVING[name])


def test_function_transforms_are_refused() -> None:
    """A capture would have their results for one batch."""
    with pytest.raises(UncapturableError, match=re.escape(CALLED_BY_VMAP)):
        recorded(lambda x: torch.vmap(lambda number: number * 2)(x))


@pytest.mark.parametrize("name", SHAPED)
def test_shapes_that_depend_on_values_are_refused(name: str) -> None:
    with pytest.raises(UncapturableError, match=f"the output shape of {name} depends"):
        recorded(SHAPED[name])


@pytest.mark.parametrize("name", KEPT)
def test_values_of_constants_and_shapes_are_captured(name: str) -> None:
    given = torch.arange(6.0).flip(0)
    assert torch.equal(recorded(KEPT[name])(given), KEPT[name](given))


class Options:
    def __init__(self) -> None:
        self.scale = 1.0
        self.steps = [1, [2]]

    def rise(self) -> None:
        self.scale += 1


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: {"a": 1}, lambda held: held.update(a=2)),
    "list in a dict": (lambda: {"a": [1]}, lambda held: held["a"].append(2)),
    "set": (lambda: {1}, lambda held: held.add(2)),
    "list in a tuple": (lambda: (1, [2]), lambda held: held[1].clear()),
    "tensor": (lambda: [torch.ones(2)], lambda held: held[0].fill_(2)),
    "array": (lambda: [np.ones(2)], lambda held: held[0].fill(2)),
    "object": (Options, lambda held: setattr(held, "scale", 2.0)),
    "list of an object": (Options, lambda held: held.steps[1].append(3)),
    "object of a method": (lambda: Options().rise, lambda held: held()),
}


@pytest.mark.parametrize("name", HELD)
def test_in_place_changes_are_noticed(name: str) -> None:
    make, change = HELD[name]
    held = make()
    found = mutable_containers_in("it", held, set())
    before = [holder.read() for holder in found]
    assert [holder.read() for holder in found] == before
    change(held)
    assert [holder.read() for holder in found] != before


def test_containers_are_refilled() -> None:
    held: dict[str, Any] = {"a": [1, 2], "b": {3}}
    found = mutable_containers_in("it", held, set())
    before = [holder.read() for holder in found]
    names = [list(h.value) if isinstance(h.value, dict) else [] for h in found]
    held["a"].append(4)
    held["b"].clear()
    del held["b"]
    for holder, keys, values in zip(found, names, before, strict=True):
        refill(holder.value, keys, values)
    assert held == {"a": [1, 2], "b": {3}}


def test_non_numeric_predictions_are_not_rounded() -> None:
    """They are equal or not, whatever rounding does to the rest."""

    def outcome(above: bool) -> Outcome:
        return Outcome(torch.tensor(1.0), [torch.tensor([above]), torch.tensor([3])], [], [], [])

    expected, moved = outcome(True), outcome(False)
    assert expected.difference(outcome(True), exact=False, rounded=moved) is None
    assert expected.difference(outcome(False), exact=False, rounded=moved) is not None


def test_inputs_and_weights_are_rounded_at_random() -> None:
    """Every channel is rounded, and the weights are restored, also for a backward pass."""
    (image,) = perturbed((torch.ones(8, 4, 4, 3),))
    steps = (image - 1) / torch.finfo(image.dtype).eps
    assert bool((steps.abs() > 0.4).all())
    assert bool((steps.reshape(-1, 3).mean(0).abs() < 0.5).all())
    weight = torch.nn.Parameter(torch.full((5,), 3.0))
    loss = (weight**2).sum()
    with perturbed_weights([weight]):
        assert bool((weight != 3).all())
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight.detach(), torch.full((5,), 3.0))
    assert torch.equal(weight.grad, torch.full((5,), 6.0))  # type: ignore[arg-type]


def test_rows_are_rolled_alike() -> None:
    """Several inputs stay aligned, and inputs without rows stay as they are."""
    rows = torch.arange(6).reshape(3, 2)
    found = rolled(({"left": rows}, rows[:, 0], torch.tensor(7), None))
    assert found[0]["left"].tolist() == [[4, 5], [0, 1], [2, 3]]
    assert found[1].tolist() == [4, 0, 2]
    assert found[2].item() == 7
    assert found[3] is None
