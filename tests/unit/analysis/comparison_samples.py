"""Made-up comparisons with the spread and the gaps of real ones."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from isotrain.analysis.compare.records import (
    Cell,
    Estimate,
    Repeat,
    Verdict,
)
from isotrain.analysis.compare.result import Comparison
from isotrain.core.system.trace_events import Span

BACKENDS = {
    "torch-ddp": ("gloo", 1.0, 0.86),
    "tf-mirrored": ("one-device", 1.32, 0.55),
    "tf-multiworker": ("ring", 1.3, 0.62),
    "horovod-torch": ("gloo", 0.97, 0.8),
    "horovod-tf": ("gloo", 1.26, 0.79),
}
"""Name: collective, speed with one replica, and efficiency of every doubling."""
MIB = 2.0**20
TRACEBACK = (
    "Replica 1 failed at step 14 in all-reduce.\n"
    "Traceback (most recent call last):\n"
    '  File "/opt/app/lib/python3.11/site-packages/tensorflow/python/distribute/'
    'collective_all_reduce_strategy.py", line 1021, in _check_health\n'
    "UnavailableError: Collective ops is aborted by: the peer did not answer <in time> & is gone\n"
    "What to do: see the log of rank 1."
)


def estimate(value: float, spread: float = 0.03) -> Estimate:
    """An estimate with an interval of that relative half-width."""
    return Estimate(value, value * (1 - spread), value * (1 + spread))


def losses(rng: random.Random, noise: float, steps: int = 120) -> list[float]:
    """A falling curve, the same for all but for `noise`."""
    curve = (0.18 + 2.1 * math.exp(-t / 25) + 0.06 * math.sin(t * 1.7) for t in range(steps))
    return [loss * (1 + noise * rng.uniform(-1, 1) * t) for t, loss in enumerate(curve)]


def timeline(replicas: int, step: float) -> list[Span]:
    """Compute on every rank, the exchange overlapping its end, and input at the start."""
    spans = []
    for rank in range(replicas):
        track, late = f"rank {rank}", 1 + 0.05 * rank
        spans += [
            Span(track, "input", 0.0, step * 0.05),
            Span(track, "compute", step * 0.05, step * 0.62 * late),
        ]
        if replicas > 1:
            spans.append(Span(track, "communication", step * 0.67 * late, step * (1 - 0.67 * late)))
        else:
            spans.append(Span(track, "update", step * 0.67, step * 0.3))
    return spans


def repeat(rng: random.Random, order: int, step: float, replicas: int) -> Repeat:
    """One run: 40 blocks of 5 steps, with now and then a slow one."""
    blocks = [
        5 * step * rng.gauss(1, 0.03) * (1.6 if rng.random() < 0.04 else 1) for _ in range(40)
    ]
    return Repeat(
        order=order,
        started=1_795_000_000.0 + 60 * order,
        block_steps=5,
        block_seconds=blocks,
        warm_up_steps=20,
        compile_s=1.2,
        first_step_s=4.1,
        peak_memory_bytes=[int((410 + 12 * rank) * MIB) for rank in range(replicas)],
        cpu_s=41.0,
        all_reduce_s=None if replicas == 1 else 0.2 * step,
    )


def plan(backend: str, collective: str, replicas: int) -> dict[str, Any]:
    """The fields of a plan, in their order."""
    return {
        "run": "digits",
        "backend": backend,
        "framework": "tensorflow" if "tf" in backend else "torch",
        "collective": collective,
        "strategy": "data-parallel",
        "strategy_options": {},
        "launcher": "local",
        "device": "cpu",
        "replicas": replicas,
        "threads": 2,
        "processes": [
            {"rank": r, "host": "localhost", "local_rank": r, "replicas": [r]}
            for r in range(replicas)
        ],
        "environment_variables": {"KERAS_BACKEND": "tensorflow" if "tf" in backend else "torch"},
        "precision": "float32",
        "global_batch_size": 64,
        "local_batch_sizes": [64 // replicas] * replicas,
        "learning_rate": 0.125,
        "notes": ["its server listens on every network interface"] if "multi" in backend else [],
        "gradient_bytes": 1_048_576,
        "exchanged_bytes_per_step": None if replicas == 1 else 2 * (replicas - 1) / replicas * MIB,
    }


def cell(backend: str, replicas: int, *, seed: int = 0, repeats: int = 3) -> Cell:
    """A finished cell of one of the known backends, or of one more."""
    collective, speed, kept = BACKENDS.get(backend, ("gloo", 1.0, 0.75))
    rng = random.Random(f"{backend} {replicas} {seed}")
    efficiency = kept ** math.log2(replicas)
    rate = 2210.0 * speed * replicas * efficiency
    step = 64 / rate
    name = f"{backend}:{collective}@{replicas}" if replicas > 1 else f"{backend}@1"
    is_reference = backend == "torch-ddp" and replicas == 1
    noise = 0.0 if is_reference else 2e-8 * (1 + len(backend) % 3) * replicas
    exact = losses(random.Random(1), 0.0)
    curve = losses(rng, noise)
    several = replicas > 1
    return Cell(
        name=name,
        backend=backend,
        collective=collective if several else "none",
        replicas=replicas,
        strategy="data-parallel",
        repeats=[repeat(rng, 3 * replicas + i, step, replicas) for i in range(repeats)],
        samples_per_s=estimate(rate, 0.02),
        step_s=estimate(step, 0.015),
        step_p95_s=estimate(step * 1.1, 0.05),
        first_step_s=estimate(3.2 + 0.4 * replicas, 0.1),
        compile_s=estimate(0.4 if "torch" in backend else 1.7, 0.1),
        peak_memory_bytes=estimate((405 + 12 * replicas) * MIB, 0.01),
        total_memory_bytes=estimate((410 + 7 * replicas) * MIB * replicas, 0.01),
        cpu_s_per_sample=estimate(2 * replicas / rate, 0.02),
        speedup=estimate(replicas * efficiency, 0.03),
        efficiency=estimate(efficiency, 0.03),
        all_reduce_s=estimate(step * 0.22, 0.1) if several else None,
        bus_bandwidth=estimate(1.4e9 / replicas, 0.08) if several else None,
        exchanged_bytes=2 * (replicas - 1) / replicas * MIB if several else None,
        losses=curve,
        last_loss=curve[-1],
        metrics={"accuracy": 0.9461 if replicas < 4 else 0.9427},
        loss_difference=max(abs(a - b) / b for a, b in zip(curve, exact, strict=True)),
        timeline=timeline(replicas, step),
        plan=plan(backend, collective if several else "none", replicas),
        plan_differences=[]
        if is_reference
        else [
            ("backend", "torch-ddp", backend),
            ("replicas", 1, replicas),
            ("local_batch_sizes", [64], [64 // replicas] * replicas),
            ("exchanged_bytes_per_step", None, 2 * (replicas - 1) / replicas * MIB),
        ],
        versions={"keras": "3.15.1", "numpy": "2.4.6"}
        | ({"tensorflow": "2.21.0"} if "tf" in backend else {"torch": "2.13.0"}),
    )


def failed(backend: str, replicas: int, reason: str = TRACEBACK) -> Cell:
    """A cell that failed, with its reason."""
    collective = BACKENDS[backend][0]
    return Cell(
        name=f"{backend}:{collective}@{replicas}",
        backend=backend,
        collective=collective,
        replicas=replicas,
        strategy="data-parallel",
        status="failed",
        reason=reason,
        plan=plan(backend, collective, replicas),
    )


def skipped(backend: str, replicas: int) -> Cell:
    """A cell that was not reached."""
    reason = "The comparison was interrupted before its first run."
    return replace(failed(backend, replicas, reason), status="skipped")


def comparison(cells: list[Cell], verdict: Verdict, **fields: Any) -> Comparison:
    """Puts cells into a comparison."""
    whole = Comparison(
        name="digits",
        spec={
            "model": "examples.digits:model",
            "data": "examples.digits:data",
            "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.875},
            "global_batch_size": 64,
            "epochs": 5,
        },
        reference="torch-ddp@1",
        created=1_795_000_000.0,
        finished=True,
        machine={
            "system": "Linux 6.1.0 x86_64",
            "python": "3.11.2",
            "processor": "Imagined Processor 9000 at 2.40 GHz",
            "cores": 8,
            "memory_gib": 31.3,
            "gpus": 0,
        },
        settings={"repeats": 3, "steps": 200, "seed": 0, "threads": 2, "time_budget_s": 600},
        cells=cells,
        verdict=verdict,
    )
    return replace(whole, **fields)


def typical() -> Comparison:
    """Five backends with 1, 2 and 4 replicas; one failed, two cannot be told apart."""
    cells = [cell(backend, n) for backend in BACKENDS for n in (1, 2, 4)]
    cells[8] = failed("tf-multiworker", 4)
    fastest, second = cells[14], cells[2]
    assert fastest.samples_per_s
    cells[2] = replace(second, samples_per_s=estimate(fastest.samples_per_s.value * 0.985, 0.02))
    reason = (
        f"{fastest.name} ({fastest.samples_per_s.value:,.0f} samples/s) and {second.name} "
        "cannot be told apart: their 95 % intervals overlap."
    )
    return comparison(cells, Verdict(None, [fastest.name, second.name], reason))


def picked() -> Comparison:
    """Three cells, one of them the fastest."""
    cells = [cell("torch-ddp", n) for n in (1, 2, 4)]
    reason = "torch-ddp:gloo@4 is the fastest, 1.7 times as fast as the next one."
    return comparison(cells, Verdict(cells[2].name, [], reason))


def single() -> Comparison:
    """One cell with one repeat, which has nothing to be compared with."""
    one = replace(
        cell("torch-ddp", 1, repeats=1),
        samples_per_s=estimate(2210.0, 0.0),
        speedup=estimate(1.0, 0.0),
        loss_difference=0.0,
    )
    return comparison([one], Verdict(one.name, [], "There is only torch-ddp@1."))


def none_finished() -> Comparison:
    """Everything failed."""
    cells = [failed(backend, 2) for backend in BACKENDS]
    return comparison(cells, Verdict(None, [], "No cell has finished."), reference=None)


def interrupted() -> Comparison:
    """Ctrl-C after a few cells."""
    cells = [cell("torch-ddp", 1), cell("torch-ddp", 2, repeats=1)]
    cells += [skipped("tf-mirrored", 2), skipped("horovod-tf", 2)]
    verdict = Verdict(cells[1].name, [], "Of the cells that finished, torch-ddp:gloo@2 is fastest.")
    return comparison(cells, verdict, finished=False)


def many() -> Comparison:
    """32 cells, some with very long names."""
    cells = [cell(backend, n) for backend in BACKENDS for n in (1, 2, 4, 8)]
    long = "a-plugin-backend-with-a-name-that-goes-on-and-on-without-any-space-in-it"
    for index in range(3):
        cells += [cell(f"{long}-{index}", n) for n in (1, 2, 4, 8)]
    fastest = max(cells, key=lambda c: c.samples_per_s.value if c.samples_per_s else 0)
    return comparison(cells, Verdict(fastest.name, [], f"{fastest.name} is the fastest."))


def broken_numbers() -> Comparison:
    """A finished cell with not-a-number, infinite and missing estimates, next to a sound one."""
    nan = math.nan
    odd = replace(
        cell("horovod-tf", 2),
        samples_per_s=Estimate(nan, nan, nan),
        step_s=None,
        step_p95_s=Estimate(0.03, 0.02, math.inf),
        total_memory_bytes=None,
        speedup=Estimate(1.2, nan, nan),
        losses=[1.0, nan, math.inf, 0.5],
        last_loss=nan,
        metrics={},
        loss_difference=math.inf,
        timeline=[],
    )
    cells = [cell("torch-ddp", 1), odd]
    return comparison(cells, Verdict(None, [], "There is no telling: a throughput is missing."))


def hostile() -> Comparison:
    """Markup and mathematics wherever a record holds a text."""
    mark = '<script>alert(1)</script> & "quoted" \'text\' $\\frac{$ ]]> url(#x) id="y"'
    one = replace(
        cell("torch-ddp", 2),
        name=f"{mark}@2",
        backend=mark,
        strategy=mark,
        python=mark,
        metrics={mark: 0.5},
        timeline=[Span(mark, mark, 0.0, 0.02)],
        plan={mark: mark},
        plan_differences=[(mark, mark, mark)],
        versions={mark: mark},
    )
    bad = failed("horovod-tf", 2, mark)
    return comparison(
        [one, bad],
        Verdict(one.name, [], mark),
        name=mark,
        spec={mark: mark},
        reference=one.name,
        machine={mark: mark},
        settings={mark: mark},
    )


ALL = {
    made.__name__: made
    for made in (
        typical,
        picked,
        single,
        none_finished,
        interrupted,
        many,
        broken_numbers,
        hostile,
    )
}
"""Every kind, by name."""
