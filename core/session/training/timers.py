"""Throughput of a run: a stopwatch over its training steps."""

from __future__ import annotations

import time


class Stopwatch:
    """Times training, without the first step (compilation, warm-up) and without evaluation.

    Attributes:
        first_step: Seconds from the session's start to the end of the first step; None before that.
    """

    def __init__(self) -> None:
        self._opened = time.perf_counter()
        self._resumed: float | None = None
        self._seconds = 0.0
        self._samples = 0
        self._timed_samples = 0
        self.first_step: float | None = None

    def step_done(self, samples: int, *, pause: bool) -> None:
        """Counts a step whose work was submitted to the device.

        Args:
            samples: Number of samples in the step's global batch.
            pause: Whether the device is idle and the time until the next step does not count.
        """
        now = time.perf_counter()
        if self.first_step is None:
            self.first_step = now - self._opened
            self._resumed = now
        elif self._resumed is None:
            self._resumed = now
        else:
            self._samples += samples
        if pause:
            self._pause(now)

    def _pause(self, now: float) -> None:
        if self._resumed is not None:
            self._seconds += now - self._resumed
            self._timed_samples += self._samples
            self._samples = 0
            self._resumed = None

    @property
    def samples_per_second(self) -> float | None:
        """Throughput over the timed steps: all but the first one of the run and after each pause."""
        running = 0.0 if self._resumed is None else time.perf_counter() - self._resumed
        seconds = self._seconds + running
        samples = self._timed_samples + self._samples
        return samples / seconds if samples and seconds > 0 else None

    def timings(self) -> dict[str, float]:
        """The timings of a result: seconds (`..._s`) and samples per second, without those not measured."""
        timings = {
            "first_step_s": self.first_step,
            "train_s": self._seconds,
            "samples_per_s": self.samples_per_second,
            "session_s": time.perf_counter() - self._opened,
        }
        return {name: value for name, value in timings.items() if value is not None}
