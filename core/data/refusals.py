"""What a run of several replicas is refused for, as its result would depend on how many there are."""

from __future__ import annotations

from isotrain.core.errors import SpecError

LOSS, TRANSFORM = "ISO301", "ISO218"
"""Codes of the check, which `ignore` in a spec silences."""

_TEXTS = {
    LOSS: "loss: it is not a mean over samples: {}. Each replica and micro-batch computes the loss of its"
    " own samples, and the step takes the mean of these losses, so loss and gradients would depend on how"
    " many there are. Return one loss per sample, or divide by the number of samples that the function is"
    " given, not by the global batch. Where the loss gathers the samples of all replicas itself, or is"
    " meant for each replica's own samples,",
    TRANSFORM: "transform: it mixes samples: {}. It is called with one replica's share of a batch, so the"
    " samples would depend on the number of replicas. Let it change each sample on its own, with the"
    " random numbers of its third argument; data that mix samples (mixup, CutMix) can be given as a stream"
    " of batches. Where the result may depend on the replicas,",
}


class RefusedError(SpecError):
    """The run is refused, unless the spec silences the code.

    Attributes:
        code: A code of the check.
        detail: The numbers of this case.
    """

    def __init__(self, code: str, detail: str) -> None:
        """Makes the message of a code."""
        self.code, self.detail = code, detail
        advice = f" `ignore: [{code}]` in the spec lets it run as it is."
        super().__init__(_TEXTS[code].format(detail) + advice)
