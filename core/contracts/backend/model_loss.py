"""An objective for models that compute their loss themselves, as those of Hugging Face do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isotrain.core.contracts.backend.step_context import weighted
from isotrain.core.errors import SpecError

_IGNORED = -100
"""Label that such models leave out, as torch's losses do."""
_SHIFTING = ("CausalLM", "LMHead", "ForConditionalGeneration")
"""Parts of the names of classes whose loss compares each position with the next label."""


def model_loss(model: Any, batch: Any, *, shifts: bool | None = None) -> tuple[Any, Any]:
    """Objective that takes the loss that a torch model returns: `objective: isotrain:model_loss`.

    The model is called with its inputs by keyword, and the targets as `labels`. Integer labels other than
    -100 count alike, so that the mean over the global batch is exact for any number of replicas.

    Args:
        model: Model that returns a mapping with `loss` and `logits`, or a tuple that begins with these.
        batch: Inputs, a dict; and targets, or None where the inputs have `labels`.
        shifts: Whether each position is compared with the next label, so that the first label does not
            count; None: by the name of the model's class, also within a model of peft.

    Returns:
        The loss with its number of labels, and the logits.

    Raises:
        SpecError: The inputs have no names, or the model returns no loss.
    """
    inputs, labels = batch[:2]
    if not isinstance(inputs, Mapping):
        raise SpecError(
            f"objective: model_loss calls the model by keywords and needs a dict of inputs; the data have"
            f" {type(inputs).__name__}."
        )
    arguments = dict(inputs) if labels is None else {**inputs, "labels": labels}
    loss, logits = _loss_and_logits(model(**arguments))
    labels = arguments.get("labels")
    if labels is None or labels.is_floating_point():
        return loss, logits  # a mean over samples
    compared = labels[..., 1:] if _shifts(model, shifts) else labels
    count = (compared != _IGNORED).sum()
    return weighted(loss.where(count > 0, 0.0), count), logits


def _loss_and_logits(output: Any) -> tuple[Any, Any]:
    """Loss and logits in a model's output.

    Raises:
        SpecError: There is no loss.
    """
    if isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
    elif isinstance(output, tuple) and len(output) > 1:
        loss, logits = output[:2]
    else:
        loss = logits = None
    if loss is None:
        raise SpecError(
            f"objective: model_loss expected a loss in the model's output, received {type(output).__name__}"
            " without one. Give the targets that the model needs for its loss."
        )
    return loss, logits


def _shifts(model: Any, shifts: bool | None) -> bool:
    """Whether the first label of each row does not count."""
    if shifts is not None:
        return shifts
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft wraps it
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return False
    return any(part in type(base).__name__ for part in _SHIFTING)
