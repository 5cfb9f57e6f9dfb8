"""What passes over recorded operations take away, and what they must leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.nn import functional

from isotrain.adapters.torch import private
from isotrain.adapters.torch.replaying import exact_passes, fast_passes

SCORES = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 1.0], [3.0, 0.0, 1.0], [1.0, 1.0, 2.0]])
CLASSES = torch.tensor([2, 0, -100, 1])
"""One is of no class: torch ignores it."""


def simplified(
    function: Callable[..., torch.Tensor], *given: torch.Tensor
) -> tuple[GraphModule, list[torch.Tensor]]:
    """A function as it is recorded, and what its graph is given first."""
    module = private.traced(function, *given)
    return module, exact_passes.simplify(module, 0, ())


def operations(module: GraphModule) -> list[str]:
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return [str(node.target).removeprefix("aten.") for node in nodes]


def mean_entropy(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """As Keras computes it: classes by way of numbers with a point, and a quotient that may be by 0."""
    values = functional.cross_entropy(scores, classes.float().long(), reduction="none")
    count = torch.as_tensor([len(values)]).prod().float()
    safe = torch.where(count == 0, torch.ones_like(count), count)
    return torch.where(count == 0, 0, torch.divide(values.sum(), safe))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_a_mean_of_entropies_takes_two_operations(kind: torch.dtype) -> None:
    """With the gradients that Keras' has."""
    classes = CLASSES if kind.is_signed else CLASSES.abs() % 3
    given = SCORES.requires_grad_(), classes.to(kind)
    module, constants = simplified(mean_entropy, SCORES.detach(), given[1])
    assert "where" not in "".join(operations(module))
    faster = fast_passes.rearranged(module)
    assert faster is not None
    casts = [] if kind == torch.int64 else ["to.dtype"]
    assert operations(faster) == [*casts, "cross_entropy_loss.default", "divide.Tensor"]
    losses = [mean_entropy(*given), module(*constants, *given), faster(*constants, *given)]
    gradients = [torch.autograd.grad(loss, SCORES)[0] for loss in losses]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(losses[0], losses[2])
    torch.testing.assert_close(gradients[0], gradients[2])


def by_choice(dropped: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Chooses by what is known when it is recorded."""

    def chosen(given: torch.Tensor) -> torch.Tensor:
        other = dropped(given) if callable(dropped) else dropped
        return torch.where(torch.tensor(False), other, given * 2)

    return chosen


def spread(given: torch.Tensor) -> torch.Tensor:
    """The choice has a larger shape than what is chosen."""
    return torch.where(torch.tensor([[False]]), 0.0, given * 2)


def seen(given: torch.Tensor) -> torch.Tensor:
    """What is chosen is changed afterwards."""
    doubled = given * 2
    return torch.where(torch.tensor(False), 0.0, doubled) + doubled.add_(1)


LEFT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "has gradients": by_choice(torch.exp),
    "is spread": spread,
    "is seen": seen,
}


@pytest.mark.parametrize("name", LEFT)
def test_a_choice_stays(name: str) -> None:
    """Where what it leaves is not the very same, for those who see it or for gradients."""
    given = torch.tensor([1.0, 2.0])
    module, constants = simplified(LEFT[name], given)
    assert "where" in "".join(operations(module))
    assert torch.equal(module(*constants, given), LEFT[name](given))


def test_classes_stay_what_rounding_makes_of_them() -> None:
    """Where there are more of them than the type of numbers has whole ones."""

    def roughly(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores, classes.half().long(), reduction="sum")

    given = SCORES.detach(), CLASSES
    module, constants = simplified(roughly, *given)
    assert fast_passes.rearranged(module) is None
    assert torch.equal(module(*constants, *given), roughly(*given))
