"""The profiler of torch: a trace of CPU and GPUs, and a table of the operations that took longest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from isotrain.adapters.torch.base import gpu

_ROWS = 30


def start_profile(folder: Path) -> Callable[[], None]:
    """Starts the profiler; the returned function stops it and writes `trace.json` and `summary.txt`."""
    profiler = torch.profiler.profile()
    profiler.start()

    def stop() -> None:
        profiler.stop()
        profiler.export_chrome_trace(str(folder / "trace.json"))
        key = gpu.PROFILE_ORDER if gpu.count() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=_ROWS)
        (folder / "summary.txt").write_text(table, encoding="utf-8")

    return stop
