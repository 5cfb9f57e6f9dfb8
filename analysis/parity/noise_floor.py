"""The noise floor: the difference that rounding explains, for every tensor and step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.parity.records import Stage
from isotrain.analysis.parity.run_trace import Differences, RunTrace, relative

MARGIN = 10.0
"""Factor on the reference's measured noise: other backends round differently, not less."""
MIN_ROUNDINGS = 4.0
"""Units in the last place that any two sums may differ by, before the margin."""
_UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_LARGEST = 2.0
"""Upper limit of relative differences."""
T = TypeVar("T")


@dataclass(frozen=True)
class NoiseRun:
    """A rerun of the reference that should differ by rounding alone.

    Attributes:
        run: Trace of the rerun.
        scale: Factor that converts its differences to the reference's precision.
    """

    def seen(self, index: int, reference: RunTrace) -> Differences:
        """The noise of each tensor in the traced step with that index, relative to the reference's norm.

        The difference is scaled, not its ratio to the norm: a tensor that is nothing but rounding is as
        small as the precision is fine, and its noise is as large as itself in every precision.
        """
        step, other = self.run.steps[index], reference.steps[index]
        noise: Differences = {("loss", "loss"): self.scale * relative(step.loss, other.loss)}
        for stage, tensors in other.tensors.items():
            for name, tensor in tensors.items():
                if name in step.tensors[stage]:
                    difference = (
                        tensor_sketch.distance(step.tensors[stage][name], tensor) * self.scale
                    )
                    noise[stage, name] = _ratio(difference, tensor.norm)
        return noise

    run: RunTrace
    scale: float


class NoiseFloor:
    """The noise floor around one reference run.

    A tensor's noise in a step is the largest seen in any noise run in that step or an earlier one; at least
    the median over all tensors of its stage, and at least some units in the last place. The floor is
    `MARGIN` times that. So it grows as fast as rounding grows in this very training, and tensors that
    are made of rounding, such as the gradient of a bias in front of a batch normalisation, have
    floors of their own.
    """

    def __init__(self, reference: RunTrace, noise: Sequence[NoiseRun]) -> None:
        self.precision = reference.precision
        self._steps = [step.step for step in reference.steps]
        self._unit = MIN_ROUNDINGS * _UNITS[reference.precision]
        self._seen = [self._noise(reference, noise, i) for i in range(len(reference.steps))]
        self._medians = [_medians(seen) for seen in self._seen]
        for later, earlier in zip(self._seen[1:], self._seen, strict=False):
            _raise_to(later, earlier)
        for now, before in zip(self._medians[1:], self._medians, strict=False):
            _raise_to(now, before)

    def _noise(self, reference: RunTrace, noise: Sequence[NoiseRun], index: int) -> Differences:
        seen: Differences = {}
        for source in noise:
            _raise_to(seen, source.seen(index, reference))
        return seen

    def at(self, index: int, stage: Stage, name: str) -> float:
        """The noise floor of a tensor in the traced step with that index, a relative difference."""
        noise = self._seen[index].get((stage, name), 0.0)
        return MARGIN * max(noise, self._medians[index].get(stage, 0.0), self._unit)

    def saturated_from(self) -> int | None:
        """The first traced step whose median gradient noise floor reaches 1; None if there is none."""
        for index, step in enumerate(self._steps):
            if MARGIN * self._medians[index].get("gradient", 0.0) >= 1.0:
                return step
        return None

    def largest(self, stage: Stage) -> float:
        """The largest measured noise of a stage over all steps."""
        return max(
            (v for seen in self._seen for (s, _), v in seen.items() if s == stage), default=0
        )


def scale_between(noise: RunTrace, reference: RunTrace) -> float:
    """The factor that scales differences to a run in another precision to the reference's precision.

    A float64 run differs from a float32 one by the rounding of float32; for a float64 reference,
    that is scaled down to the rounding of float64.
    """
    return min(1.0, _UNITS[reference.precision] / _UNITS[noise.precision])


def _ratio(difference: float, norm: float) -> float:
    if not difference:
        return 0.0
    return min(_LARGEST, difference / norm) if norm else _LARGEST


def _medians(seen: Differences) -> dict[Stage, float]:
    stages = {stage for stage, _ in seen}
    return {
        stage: statistics.median(value for (key, _), value in seen.items() if key == stage)
        for stage in stages
    }


def _raise_to(values: dict[T, float], least: dict[T, float]) -> None:
    for key, value in least.items():
        values[key] = max(values.get(key, 0.0), value)
