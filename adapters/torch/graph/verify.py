"""What one call of a computation did: by this, a replayed step is compared to an eager one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from isotrain.adapters.torch.base.pytree import filled, leaves
from isotrain.adapters.torch.metrics.base import MeasuredPredictions


def perturbed(tree: Any) -> Any:
    """A tree of tensors, each number of which is off by its last bit, upwards or downwards by chance."""
    generator = torch.Generator().manual_seed(0)
    return filled(tree, (_rounded(part, generator) for part in leaves(tree)))


@contextmanager
def perturbed_weights(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it, weights are off by their last bit; nobody who keeps one for a backward pass notices."""
    kept = [weight.data for weight in weights]
    for weight, changed in zip(weights, perturbed(kept), strict=True):
        weight.data = changed
    try:
        yield
    finally:
        for weight, data in zip(weights, kept, strict=True):
            weight.data = data


def _rounded(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return tensor * (1 + torch.finfo(tensor.dtype).eps * signs.to(tensor))


_TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4}
_ROUGH = 3e-2
"""Of norms, for results of half precision."""
_OF_ALL = 1e-2
"""How much of the norm of all gradients counts for one of them: some are nothing but rounding."""
_GROWN = 16
"""How much more than on inputs that are rounded otherwise the same operations, others may differ."""
METRICS_DIFFER = "metrics differ from those of a step without the record"


class Snapshot:
    """Tensors and random generators as they were, to start from them again."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._values = [tensor.detach().clone() for tensor in tensors]
        devices = sorted({t.device for t in tensors if t.device.type == "cuda"}, key=str)
        self._devices = devices
        self._random = self.random_states()

    def random_states(self) -> list[torch.Tensor]:
        """Of the generators, now."""
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def restore(self) -> None:
        """Puts everything back."""
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.copy_(value)
        torch.set_rng_state(self._random[0])
        for device, state in zip(self._devices, self._random[1:], strict=True):
            torch.cuda.set_rng_state(state, device)


@dataclass(frozen=True, eq=False)
class Outcome:
    """All that a call gave and moved.

    Attributes:
        loss: A scalar, or in two rows.
        predictions: Their tensors.
        gradients: Of the loss, for each parameter; None where it has none.
        moved: The variables that are not trained, afterwards.
        random: States of the generators, afterwards.
        wrong_metrics: The names of metrics that are part of a record, and got what Keras would not add.
    """

    loss: torch.Tensor
    predictions: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    moved: list[torch.Tensor]
    random: list[torch.Tensor]
    wrong_metrics: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        compute: Callable[[Any, Any], tuple[torch.Tensor, Any]],
        batch: tuple[Any, Any],
        parameters: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        wrong_metrics: Callable[[Any, MeasuredPredictions], Sequence[str]],
    ) -> Outcome:
        """Calls a computation, and takes everything back that it moved.

        Args:
            compute: What to call.
            batch: Inputs and targets.
            parameters: To take gradients for, where gradients are taken at all.
            others: Variables that it may move.
            wrong_metrics: The names of metrics to which Keras adds something else for these targets.
        """
        before = Snapshot(others)
        loss, predictions = compute(*batch)
        wrong: Sequence[str] = ()
        if isinstance(predictions, MeasuredPredictions):
            wrong, predictions = wrong_metrics(batch[1], predictions), predictions.predictions
        gradients: list[torch.Tensor | None] = []
        if loss.requires_grad:
            total = (
                loss[0].sum() if loss.dim() else loss
            )  # the second row is what the first counts by
            gradients = list(torch.autograd.grad(total, parameters, allow_unused=True))
        found = cls(
            loss.detach(),
            [part.detach() for part in leaves(predictions)],
            gradients,
            [tensor.detach().clone() for tensor in others],
            before.random_states(),
            wrong,
        )
        before.restore()
        return found

    def difference(self, other: Outcome, exact: bool, rounded: Outcome | None = None) -> str | None:
        """In what another outcome is not this one; None where they agree.

        It is `METRICS_DIFFER` where they agree in all else.

        Args:
            other: Of the same batch, from the same state.
            exact: Whether they must agree to the bit.
            rounded: This one's with inputs that were rounded otherwise: the other may differ as much as
                rounding grows. None where a fixed measure is enough.
        """
        if not all(map(torch.equal, self.random, other.random)):
            return "it draws other random numbers"
        theirs = other.parts
        grown = {} if rounded is None else rounded.parts
        for name, ours in self.parts.items():
            if not agree(ours, theirs[name], exact, _noise(ours, grown.get(name, ours))):
                verb = "differs from that" if name == "the loss" else "differ from those"
                return f"{name} {verb} of a step without the record"
        return METRICS_DIFFER if other.wrong_metrics else None

    @property
    def parts(self) -> dict[str, Sequence[torch.Tensor | None]]:
        """What is compared, but for the random numbers."""
        return {
            "the loss": [self.loss],
            "the predictions": self.predictions,
            "the moving statistics": self.moved,
            "the gradients": self.gradients,
        }


def _noise(
    ours: Sequence[torch.Tensor | None], rounded: Sequence[torch.Tensor | None]
) -> list[float]:
    """By how much each tensor may differ for rounding, beyond the fixed measure."""
    apart = [_apart(one, other) for one, other in zip(ours, rounded, strict=True)]
    share = _OF_ALL * sum(apart)
    return [_GROWN * (each + share) for each in apart]


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """How far two tensors of numbers are from each other; nothing else is rounded."""
    if one is None or other is None or one is other or not one.is_floating_point():
        return 0.0
    return _norm(one - other)


def agree(
    ours: Sequence[torch.Tensor | None],
    theirs: Sequence[torch.Tensor | None],
    exact: bool,
    noise: Sequence[float],
) -> bool:
    """Whether tensors are the same, to the bit or nearly.

    Args:
        ours: Some tensors.
        theirs: Others.
        exact: Whether to the bit.
        noise: By how much more than a fixed measure each may differ where not.
    """
    if len(ours) != len(theirs):
        return False
    whole = _OF_ALL * sum(map(_norm, ours))
    pairs = zip(ours, theirs, noise, strict=True)
    return all(_is_near(one, other, exact, whole, grown) for one, other, grown in pairs)


def _norm(tensor: torch.Tensor | None) -> float:
    if tensor is None or not tensor.is_floating_point():
        return 0.0
    return float(torch.linalg.vector_norm(tensor.nan_to_num(0, 0, 0), dtype=torch.float64))


def _is_near(
    ours: torch.Tensor | None,
    theirs: torch.Tensor | None,
    exact: bool,
    whole: float,
    noise: float,
) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(same.all()):
        return True
    if exact or not ours.is_floating_point():
        return False
    apart = torch.where(same, 0, ours - theirs)
    tolerance = _TOLERANCE.get(ours.dtype, _ROUGH)
    bound = tolerance * (_norm(ours) + whole) + noise
    return bool(apart.isfinite().all()) and _norm(apart) <= bound
