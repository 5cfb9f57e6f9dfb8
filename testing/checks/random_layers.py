"""Check of dropout by sample against masks of NumPy: the same on every backend and number of replicas."""

from __future__ import annotations

import numpy as np

from isotrain.testing import reference_model
from isotrain.testing.check_context import CheckContext, assert_close, batches_in_order

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_WORD = 0xFFFFFFFF
_Words = tuple[np.ndarray, np.ndarray]


def draws_per_sample(context: CheckContext) -> None:
    """With `random_layers: per-sample`, dropout drops the published numbers of seed, step and sample."""
    samples = reference_model.samples(noise=1.0)
    results = []
    for accumulation in (1, 2):
        context.restart()
        size = reference_model.GLOBAL_BATCH
        for batch in batches_in_order(context.group, samples, size, accumulation):
            gradients, _ = context.gradients_of_all(batch)
            mean = sum(each["noisy/kernel"] for each in gradients) / len(gradients)
            results.append((batch.step, batch.size, mean))
    for step, size, mean in results:
        masks = 2.0 * kept_units(reference_model.SEED, step, size, reference_model.NOISE, 0.5)
        assert_close(mean, masks.mean(axis=0)[:, None], f"mean mask of step {step}")


def kept_units(seed: int, step: int, samples: int, width: int, rate: float) -> np.ndarray:
    """Units that the first dropout of a model keeps in a training step, bool [samples, width].

    The key of the draw is made of the seed; the step is added to its second word. The counter is the sample
    and half the index of the unit. A unit is kept if the upper 23 bits of its word are below `1 - rate`.
    """
    zero = np.zeros(1, np.uint64)
    first, second = _threefry((zero + (seed & _WORD), zero + (seed >> 32)), (zero, zero))
    rows, blocks = np.indices((samples, (width + 1) // 2)).astype(np.uint64)
    words = _threefry((first, (second + step) & _WORD), (rows, blocks))
    numbers = np.stack(words, -1).reshape(samples, -1)[:, :width] >> 9
    kept: np.ndarray = numbers < round((1 - rate) * 2**23)
    return kept


def _threefry(key: _Words, counter: _Words) -> _Words:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011) on 32-bit words in uint64 arrays of any shape."""
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    first, second = (counter[0] + keys[0]) & _WORD, (counter[1] + keys[1]) & _WORD
    for index in range(20):
        bits = _ROTATIONS[index % 8]
        first = (first + second) & _WORD
        second = (second << bits | second >> (32 - bits)) & _WORD ^ first
        if index % 4 == 3:
            injection = index // 4 + 1
            first = (first + keys[injection % 3]) & _WORD
            second = (second + keys[(injection + 1) % 3] + injection) & _WORD
    return first, second
