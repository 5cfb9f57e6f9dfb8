"""The error for specs whose result would depend on the number of replicas."""

from __future__ import annotations

from isotrain.core.errors import SpecError

LOSS, TRANSFORM = "ISO301", "ISO218"
"""Codes of `isotrain check`, which `ignore` in a spec silences."""

_TEXTS = {
    LOSS: "loss: it is not a mean over samples: {}. Each replica and micro-batch computes the loss of its"
    " local samples, and the step takes the mean of these losses, so loss and gradients would depend on how"
    " many there are. Return one loss per sample, or divide by the number of samples that the function"
    " receives, not by the global batch size. Where the loss gathers the samples of all replicas itself, or"
    " is meant for each replica's local samples,",
    TRANSFORM: "transform: it mixes samples: {}. It is called with one replica's local batch, so the samples"
    " would depend on the number of replicas. Let it change each sample independently, with the random"
    " numbers of its third argument; for mixup and CutMix, `random.partner()` gives each sample another one"
    " of the global batch. Where the result may depend on the replicas,",
}


class RefusedError(SpecError):
    """The run is refused unless the spec's `ignore` has the code.

    Attributes:
        code: Code of the finding of `isotrain check`.
        detail: The measured difference, as text.
    """

    def __init__(self, code: str, detail: str) -> None:
        """Fills the message of the code."""
        self.code, self.detail = code, detail
        advice = f" `ignore: [{code}]` in the spec lets it run as it is."
        super().__init__(_TEXTS[code].format(detail) + advice)
