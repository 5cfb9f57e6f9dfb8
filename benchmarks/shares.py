"""Samples per second with a slow replica, with equal shares of each global batch and with `shares: by-speed`.

    python -m benchmarks.shares --backend torch-ddp --slow 2 --rounds 5

Each replica also sleeps for each part that it computes, the last one longer: so its speed does not depend on
what else the machine does. Runs with equal shares and by speed are interleaved. The first steps, in which
frameworks set up and speeds are measured, do not count.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from typing import Any

import isotrain
from benchmarks import same_bits

_WARM_UP = 30
"""Steps before those whose time counts."""
_PART_SECONDS = 0.01
"""Seconds of a part on a fast replica, besides the model's."""


def spec(parts: int, steps: int, by_speed: bool) -> dict[str, Any]:
    """The spec of a run: a small MLP, whose own time is short."""
    fields = same_bits.spec("mlp", _WARM_UP + steps)
    fields |= {"reproducible": {"granularity": parts}, "threads": 1, "drop_remainder": True}
    return fields | ({"shares": {"every": 10}} if by_speed else {})


def trained(session: isotrain.Session, slow: float) -> tuple[float, list[int], Any]:
    """Samples per second of the run, parts of each replica in the last step, and weights."""
    pause = _PART_SECONDS * (slow if session.rank == session.replicas - 1 else 1.0)
    samples, start = 0, 0.0
    counts: tuple[int, ...] = ()
    for batch in session.batches():
        if batch.step == _WARM_UP:
            start = time.perf_counter()
        time.sleep(pause * max(map(len, batch.slices)))
        session.step(batch)
        samples += batch.size * (batch.step >= _WARM_UP)
        counts = batch.part_counts or ()
    return samples / (time.perf_counter() - start), list(counts), session.read_state()


def measured(chosen: argparse.Namespace, by_speed: bool) -> tuple[float, list[int], Any]:
    """Return value of `trained` on rank 0 of a run."""
    return isotrain.launch(
        functools.partial(trained, slow=chosen.slow),
        spec(chosen.parts, chosen.steps, by_speed),
        backend=chosen.backend,
        replicas=chosen.replicas,
        on_event=lambda event: None,
    )[0]


def main() -> None:
    """Runs both, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="torch-ddp")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument(
        "--slow", type=float, default=2.0, help="how many times as long a part takes"
    )
    parser.add_argument("--parts", type=int, default=16, help="parts of a global batch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    rounds = [(measured(chosen, False), measured(chosen, True)) for _ in range(chosen.rounds)]
    ratios = sorted(dealt[0] / equal[0] for equal, dealt in rounds)
    bits = sum(same_bits.differing_bits(equal[2], dealt[2]) for equal, dealt in rounds)
    (*_, (equal, dealt)) = rounds
    print(
        "| backend | replicas | slow | parts, equal | parts, by speed | samples/s, equal | by speed |"
        " ratio | smallest and largest | differing bits |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    cells = [chosen.backend, chosen.replicas, f"{chosen.slow:g}x", equal[1], dealt[1]]
    cells += [f"{statistics.median(pair[each][0] for pair in rounds):.0f}" for each in (0, 1)]
    cells += [f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f}, {ratios[-1]:.2f}", bits]
    print("|", " | ".join(map(str, cells)), "|")


if __name__ == "__main__":
    main()
