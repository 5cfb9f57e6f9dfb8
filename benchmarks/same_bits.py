"""Bits that differ between runs with `reproducible: bits` on several numbers of replicas, and what it costs.

    python benchmarks/same_bits.py --backend torch-ddp --replicas 1,2,3,4,8 --steps 200
    python benchmarks/same_bits.py --backend torch-ddp --replicas 1,2 --steps 200 --cost 7
    python benchmarks/same_bits.py --backend torch-ddp --replicas 2,3,4 --exchange 15 --megabytes 20

A row for each model: the bits of losses, metrics, weights and optimizer state that differ in pairs of runs.
Or, with `--cost ROUNDS`, the processor time of a step on all replicas, with `reproducible: bits` and with as
many micro-batches by `gradient_accumulation_steps`, both with random layers by sample: medians of interleaved
runs. Or, with `--exchange ROUNDS`, the duration of a sum in the order of the parts, and of the backend's
all-reduce of as many elements: medians, by turns in the same processes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from typing import Any

import numpy as np

import isotrain
from isotrain.core.contracts.backend.replica import Replica
from isotrain.core.contracts.backend.tree_sum import subtrees_of_replicas, sum_over_replicas
from isotrain.core.data.sampler import equal_part_counts

MODELS = ("mlp", "cnn", "transformer", "lstm")
PARTS = 8
"""Parts of a global batch by default, and micro-batches of what a step is compared with."""
WARM_UP = 80
"""Steps before those whose time counts: graphs are captured, and both batch sizes of an epoch have come."""


def data() -> Any:
    """600 images and their classes: the last batch of an epoch, and its parts, are smaller than others."""
    draw = np.random.default_rng(1)
    return draw.standard_normal((600, 12, 12, 1)).astype("float32"), draw.integers(0, 10, 600)


def model(kind: str) -> Any:
    """A portable model; all but the CNN drop activations out."""
    import keras

    layers = keras.layers
    image = keras.Input((12, 12, 1))
    rows = layers.Reshape((12, 12))(image)
    if kind == "mlp":
        hidden = layers.Dropout(0.2)(layers.Dense(128, "relu")(layers.Flatten()(image)))
    elif kind == "cnn":
        hidden = layers.GroupNormalization(4)(layers.Conv2D(8, 3)(image))
        hidden = layers.Conv2D(16, 3)(layers.MaxPooling2D()(layers.Activation("relu")(hidden)))
        hidden = layers.GlobalAveragePooling2D()(hidden)
    elif kind == "lstm":
        hidden = layers.Dropout(0.2)(layers.LSTM(32)(rows))
    else:
        hidden = layers.Dense(16)(rows)
        for _ in range(2):
            normal = layers.LayerNormalization()(hidden)
            attended = layers.MultiHeadAttention(2, 8)(normal, normal)
            hidden = layers.Add()([hidden, layers.Dropout(0.1)(attended)])
            mixed = layers.Dense(32, "gelu")(layers.LayerNormalization()(hidden))
            hidden = layers.Add()([hidden, layers.Dropout(0.1)(layers.Dense(16)(mixed))])
        hidden = layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(image, layers.Dense(10)(hidden))


def spec(kind: str, steps: int) -> dict[str, Any]:
    """The spec of a run."""
    return {
        "model": model,
        "model_args": {"kind": kind},
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["sparse_categorical_accuracy"],
        "optimizer": {"name": "adam", "lr": 0.003},
        "clip": {"global_norm": 0.5},
        "global_batch_size": 64,
        "steps": steps,
        "validation_split": 0.2,
        "random_layers": "per-sample",
        "reproducible": "bits",
    }


def trained(session: isotrain.Session) -> dict[str, np.ndarray]:
    """Everything that a session computes, by name."""
    losses = np.array([float(session.step(batch)) for batch in session.batches()])
    measured = {**session.metrics(), **session.validate()}
    numbers = {name: np.array(value) for name, value in measured.items()}
    return {"losses": losses, **numbers, **session.read_state()}


def differing_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> int:
    """Number of bits that differ in arrays of equal names and shapes."""
    assert one.keys() == other.keys()
    pairs = ((one[name].tobytes(), other[name].tobytes()) for name in one)
    return sum((int.from_bytes(a) ^ int.from_bytes(b)).bit_count() for a, b in pairs)


def processor_time(session: isotrain.Session) -> float:
    """Processor time of a step on this rank, in milliseconds."""
    batches = session.batches()
    for batch in itertools.islice(batches, WARM_UP):
        session.step(batch)
    start = time.process_time()
    measured = 0
    for batch in batches:
        session.step(batch)
        measured += 1
    return (time.process_time() - start) / measured * 1e3


def print_costs(chosen: argparse.Namespace) -> None:
    """Prints the processor time of a step with and without `reproducible`, for each number of replicas."""
    print(
        "| model | backend | replicas | bits, ms | micro-batches, ms | ratio | smallest and largest |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for kind in chosen.models.split(","):
        fields = spec(kind, WARM_UP + chosen.steps)
        for replicas in map(int, chosen.replicas.split(",")):
            others = {"reproducible": None, "threads": 1}
            others["gradient_accumulation_steps"] = PARTS // replicas
            rounds = [
                [
                    sum(launched(processor_time, each, chosen.backend, replicas))
                    for each in (fields, fields | others)
                ]
                for _ in range(chosen.cost)
            ]
            bits, micro_batches = np.median(rounds, axis=0)
            ratios = sorted(one / other for one, other in rounds)
            cells = [kind, chosen.backend, replicas, f"{bits:.2f}", f"{micro_batches:.2f}"]
            cells += [f"{np.median(ratios):.2f}", f"{ratios[0]:.2f} {ratios[-1]:.2f}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


def all_reduce(replica: Replica, *vectors: Any) -> Any:
    """The backend's all-reduce of the first of some vectors. Collective."""
    return replica.all_reduce(vectors[0])


def exchange_times(session: isotrain.Session, rounds: int, megabytes: float) -> list[list[float]]:
    """Milliseconds of a sum in the order of the parts, and of an all-reduce, of each round."""
    group = session.group
    draw = np.random.default_rng(session.rank)
    size = int(megabytes * 250_000)
    parts = equal_part_counts(PARTS, group.replicas)
    count = max(map(len, subtrees_of_replicas(parts)))
    vectors = [
        [group.tensor(draw.standard_normal(size, dtype=np.float32)) for _ in group.local_replicas]
        for _ in range(count)
    ]
    sums = [[[each] for each in row] for row in vectors]
    ways = (
        lambda: group.compute(sum_over_replicas, *sums, static=(parts, ())),
        lambda: group.compute(all_reduce, *vectors),
    )
    times: list[list[float]] = []
    for _ in range(rounds + 1):
        times.append([])
        for way in ways:
            session.barrier()
            start = time.perf_counter()
            way()
            session.barrier()
            times[-1].append((time.perf_counter() - start) * 1e3)
    return times[1:]


def print_exchanges(chosen: argparse.Namespace) -> None:
    """Prints the duration of an exchange in the order of the parts, and of an all-reduce."""
    print(
        "| backend | replicas | MB | in order, ms | all-reduce, ms | ratio | smallest and largest |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    work = functools.partial(exchange_times, rounds=chosen.exchange, megabytes=chosen.megabytes)
    for replicas in map(int, chosen.replicas.split(",")):
        rounds = launched(work, spec("mlp", 1), chosen.backend, replicas)[0]
        ordered, all_reduced = np.median(rounds, axis=0)
        ratios = sorted(one / other for one, other in rounds)
        cells = [chosen.backend, replicas, chosen.megabytes]
        cells += [f"{ordered:.1f}", f"{all_reduced:.1f}", f"{np.median(ratios):.2f}"]
        print("|", " | ".join(map(str, cells)), f"| {ratios[0]:.2f} {ratios[-1]:.2f} |", flush=True)


def launched(work: Any, fields: dict[str, Any], backend: str, replicas: int) -> list[Any]:
    """Return values of the work on each rank."""
    quiet: dict[str, Any] = {"on_event": lambda event: None}
    return isotrain.launch(work, fields, backend=backend, replicas=replicas, **quiet)


def main() -> None:
    """Runs the models and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="torch-ddp")
    parser.add_argument("--replicas", default="1,2,3,4,8", help="numbers of replicas")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cost", type=int, metavar="ROUNDS", help="measure time, not bits")
    parser.add_argument("--exchange", type=int, metavar="ROUNDS", help="measure the exchange")
    parser.add_argument("--megabytes", type=float, default=20, help="size of what is exchanged")
    chosen = parser.parse_args()
    if chosen.exchange:
        print_exchanges(chosen)
        return
    if chosen.cost:
        print_costs(chosen)
        return
    counts = [int(count) for count in chosen.replicas.split(",")]
    print("| model | backend | replicas | steps | numbers | pairs of runs | differing bits |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for kind in chosen.models.split(","):
        results = []
        for count in counts:
            results += launched(trained, spec(kind, chosen.steps), chosen.backend, count)[:1]
        pairs = list(itertools.combinations(results, 2))
        bits = sum(differing_bits(*pair) for pair in pairs)
        numbers = sum(array.size for array in results[0].values())
        cells = kind, chosen.backend, chosen.replicas, chosen.steps, numbers, len(pairs), bits
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
