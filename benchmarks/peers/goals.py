"""Goals of isotrain on two cores: the runs that show whether each is reached."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.peers.contenders import PEERS
from benchmarks.peers.run import Cell
from benchmarks.peers.table import Row
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.statistics import Estimate

_TORCH = ("torch-ddp", "isotrain/torch-ddp/native", "isotrain/torch-ddp/portable")
_MIRRORED = ("tf-mirrored", "isotrain/tf-mirrored/native", "isotrain/tf-mirrored/portable")
_PROCESSES = tuple(
    name
    for backend in ("tf-multiworker", "horovod-torch", "horovod-tf")
    for name in (backend, f"isotrain/{backend}/native", f"isotrain/{backend}/portable")
)
_CELLS = {
    **dict.fromkeys(_TORCH, ((1, 1), (1, 2), (2, 1))),
    **dict.fromkeys((*PEERS, *_MIRRORED), ((1, 1), (2, 1))),
    **dict.fromkeys(_PROCESSES, ((2, 1),)),
}
"""The replicas and threads that each contender is measured on."""


def is_about(cell: Cell) -> bool:
    """Whether a goal takes its measure from a cell."""
    return (cell.replicas, cell.threads) in _CELLS.get(cell.contender.name, ())


@dataclass(frozen=True)
class Goal:
    """A goal: a bound on a figure of some rows.

    Attributes:
        text: Sentence on the goal.
        seen: Function from a row to its figure; None where the goal is not about the row.
        bound: Function from a row to the bound that the figure should not exceed.
        unit: Unit of figure and bound.
    """

    text: str
    seen: Callable[[Row], Estimate | None]
    bound: Callable[[Row], float]
    unit: str = ""

    def line(self, rows: Iterable[Row]) -> str:
        """One line of a Markdown table: where it was reached, missed, or neither."""
        found: dict[str, list[str]] = {"reached": [], "open": [], "missed": []}
        for row in rows:
            if (seen := self.seen(row)) is not None:
                bound = self.bound(row)
                verdict = "missed" if seen.low > bound else "open"
                verdict = "reached" if seen.value <= bound else verdict
                found[verdict].append(f"{row.cell}: {seen.text(self.unit, 2)}, to be {bound:.2f}")
        texts = ("<br>".join(found[name]) for name in ("open", "missed"))
        return f"| {self.text} | {len(found['reached'])} | {' | '.join(texts)} |"


def _of(*endings: str) -> Callable[[Row], bool]:
    return lambda row: row.cell.contender.name.endswith(endings)


def _native_bound(row: Row) -> float:
    """Times by hand: 1.02, or 20 µs more where that takes less than 1 ms."""
    assert row.ratio is not None
    by_hand_ms = row.step_ms.value / row.ratio.value
    return 1.02 if by_hand_ms >= 1 else max(1.02, 1 + 0.02 / by_hand_ms)


def _needs_more(row: Row) -> bool:
    """Whether a workload needs more than a model, a loss and an optimizer."""
    return bool(WORKLOADS[row.cell.workload].contenders)


_native, _torch = _of("/native"), _of("torch-ddp/native")
_torch_portable = _of("torch-ddp/portable", "horovod-torch/portable")
_tf_portable = _of("tf-mirrored/portable", "tf-multiworker/portable", "horovod-tf/portable")
GOALS = (
    Goal(
        "native, at most 1.02 times by hand, or 20 µs more below 1 ms",
        lambda row: row.ratio if _native(row) and not _needs_more(row) else None,
        _native_bound,
    ),
    Goal(
        "native GAN, contrastive loss and average of weights, at most 1.05 times by hand",
        lambda row: row.ratio if _native(row) and _needs_more(row) else None,
        lambda row: 1.05,
    ),
    Goal(
        "native, at most 0.97 times the fastest peer",
        lambda row: row.to_peer if _native(row) else None,
        lambda row: 0.97,
    ),
    Goal(
        "portable on torch, at most 1.05 times native (mlp-64: 1.3)",
        lambda row: row.to_native if _torch_portable(row) else None,
        lambda row: 1.3 if row.cell.workload == "mlp-64" else 1.05,
    ),
    Goal(
        "portable on TensorFlow, at most 1.02 times by hand",
        lambda row: row.ratio if _tf_portable(row) else None,
        lambda row: 1.02,
    ),
    Goal(
        "native torch, one replica: first step at most 0.1 s later than by hand",
        lambda row: row.added if _torch(row) and row.cell.replicas == 1 else None,
        lambda row: 0.1,
        " s",
    ),
)


def summary(rows: list[Row]) -> str:
    """All goals, as Markdown."""
    return (
        "### Goals\n\nReached by the median; missed where all of the interval is above; open between.\n\n"
        "| goal | reached | open | missed |\n|---|---|---|---|\n"
        + "\n".join(goal.line(rows) for goal in GOALS)
        + "\n"
    )


def exchange() -> str:
    """Output of the program for the goal of many gradients: 105 million, under `tf-multiworker`."""
    command = [sys.executable, "-m", "benchmarks.exchange"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
