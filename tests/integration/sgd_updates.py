"""Updates by torch's SGD, and as isotrain makes them: the work of a process, whose weights must be equal."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import isotrain

OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.875},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
]
STEPS, DISTURBED = 12, 5
"""Updates of each case; and the number of the one before which something happens."""


def _nothing(optimizer: Any, weights: list[Any]) -> None:
    """Changes nothing: all steps are alike."""


def _no_gradient(optimizer: Any, weights: list[Any]) -> None:
    weights[1].grad = None


def _sparse_gradient(optimizer: Any, weights: list[Any]) -> None:
    weights[0].grad = weights[0].grad.to_sparse()


def _listened_to(optimizer: Any, weights: list[Any]) -> None:
    optimizer.register_step_post_hook(lambda *given: None)


def _state_loaded(optimizer: Any, weights: list[Any]) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for slots in saved["state"].values():
        slots["momentum_buffer"] += 1.0
    optimizer.load_state_dict(saved)


def _state_taken(optimizer: Any, weights: list[Any]) -> None:
    del optimizer.state[weights[1]]


def _storage_changed(optimizer: Any, weights: list[Any]) -> None:
    weights[0].data = weights[0].data * 0.5


MOMENTUM = OPTIONS[1]
DISTURBANCES: list[tuple[str, Callable[..., None], dict[str, Any], int]] = [
    ("missing gradient", _no_gradient, MOMENTUM, 2),
    ("sparse gradient", _sparse_gradient, {}, 1),
    ("listened to", _listened_to, MOMENTUM, 1 + STEPS - DISTURBED),
    ("state loaded", _state_loaded, MOMENTUM, 1),
    ("state taken away", _state_taken, MOMENTUM, 2),
    ("storage changed", _storage_changed, MOMENTUM, 1),
]
"""What happens, under which options; and how many of the updates are then the optimizer's own steps."""


def seen(spec: isotrain.TrainingSpec) -> dict[str, tuple[bool, int, int]]:
    """Whether all bits are equal, by case; and how often the optimizer's `step` ran, and should have."""
    import torch

    from isotrain.adapters.torch.optim.fused_sgd import native_update

    found = {}
    types = (torch.float32, torch.float64)
    for options, decay, dtype in itertools.product(OPTIONS, (0.0, 0.01), types):
        given = {**options, "weight_decay": decay}
        own = 1 if options else 0  # which makes the momenta
        found[f"{given} {dtype}"] = (*_compared(spec, native_update, given, dtype, _nothing), own)
    for name, disturb, options, own in DISTURBANCES:
        found[name] = (*_compared(spec, native_update, options, torch.float64, disturb), own)
    for name, weight in {
        "elsewhere": torch.nn.Parameter(torch.zeros(1, device="meta")),
        "of a kind of its own": torch.nn.Buffer(torch.zeros(1)),
    }.items():
        optimizer = torch.optim.SGD([weight])
        found[name] = (native_update(spec, optimizer) == optimizer.step, 0, 0)
    return found


def _compared(
    spec: Any, native_update: Any, options: dict[str, Any], dtype: Any, disturb: Any
) -> tuple[bool, int]:
    left, _ = _trained(options, dtype, disturb, lambda optimizer, weights: optimizer.step)
    right, steps = _trained(
        options, dtype, disturb, lambda optimizer, weights: native_update(spec, optimizer)
    )
    return left == right, steps


def _trained(
    options: dict[str, Any], dtype: Any, disturb: Any, update_of: Any
) -> tuple[list[list[float]], int]:
    """The weights and momenta of all steps, and how often the optimizer's own `step` was called."""
    import torch

    class Counting(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            type(self).steps += 1
            return super().step(closure)

    random = torch.Generator().manual_seed(11)
    weights = [
        torch.nn.Parameter(torch.randn(shape, dtype=dtype, generator=random))
        for shape in [(33, 7), (7,), ()]
    ]
    optimizer = Counting(weights, lr=0.1, **options)
    update, kept = update_of(optimizer, weights), []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, dtype=dtype, generator=random)
        if step == DISTURBED:
            disturb(optimizer, weights)
        update()
        slots = [slot for own in optimizer.state.values() for slot in own.values()]
        kept += [each.flatten().tolist() for each in (*weights, *slots) if each is not None]
    return kept, Counting.steps
