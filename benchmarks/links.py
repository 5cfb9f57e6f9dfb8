"""Bytes that strategies send between hosts with slow links, and the duration of a step there.

    PYTHONPATH=tests:. python -m benchmarks.links                 # 2 hosts of 2 replicas
    PYTHONPATH=tests:. python -m benchmarks.links --model vgg --hosts 4 --slots 1 --accumulate 8 \\
        --strategy data-parallel --strategy pipeline,stages=4
    PYTHONPATH=tests:. python -m benchmarks.links --digits --slots 1 --steps 1008 --mbit 10000 \\
        --strategy data-parallel --strategy diloco,every=56,bits=4
    PYTHONPATH=tests:. python -m benchmarks.links --hosts 4 --slots 1 --slow-mbit 20 \\
        --strategy data-parallel --strategy parts --strategy by-speed

In place of a strategy, `parts` is `data-parallel` with `reproducible` and 8 parts, and `by-speed` the same
with `shares: by-speed`. `--slow-mbit` is the rate of the last host's link.

With `--digits` it learns the digits of scikit-learn, and prints the accuracy on others after all steps.

Hosts are network namespaces, which takes root, with links of `--mbit`. Bytes are those that left a host by
its interface, the mean of all hosts, as the kernel has counted them; beside them what the plan predicts for
all-reduces in rings, in which ranks are in the order of their hosts: what one of them sends is then what
leaves a host. Pipelines with the `gigabits` of the links also have a predicted duration of a step, and beside
the first of them `data-parallel` has. All hosts share the cores of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import isotrain
from isotrain.core.cli.argument_types import name_with_options
from isotrain.core.pipeline.partition import Partitioner
from isotrain.testing import digits

STRATEGIES = ("data-parallel", "hierarchical", "local-sgd,every=8")
PARTS: dict[str, Any] = {"reproducible": {"granularity": 8}}
IN_PARTS = {"parts": PARTS, "by-speed": {**PARTS, "shares": "by-speed"}}
"""Fields of `data-parallel` runs that have a name in place of a strategy."""
_CLASSES = 10
_SAMPLES = 4096
"""So many that an epoch, whose end waits for all losses, has 128 steps of 32."""
_WARM_STEPS = 8
_ALL_STEPS = 80_000
"""Steps of the planned run: so many that the end of a run, which sends weights, does not count."""
_JOB = "links"


def mlp() -> Any:
    """MLP with 1.1 million weights."""
    from keras import Input, Sequential, layers

    hidden = [layers.Dense(1024, "relu", name=f"hidden{number}") for number in range(2)]
    return Sequential([Input((64,)), *hidden, layers.Dense(_CLASSES, name="head")])


def vgg() -> Any:
    """Convolutions with few weights, and dense layers with 3.2 million."""
    from keras import Input, Sequential, layers

    model = Sequential([Input((32, 32, 3))])
    for number, channels in enumerate((16, 32)):
        model.add(layers.Conv2D(channels, 3, padding="same", activation="relu", name=f"c{number}"))
        model.add(layers.MaxPooling2D(name=f"pool{number}"))
    model.add(layers.Flatten(name="flat"))
    for number in range(2):
        model.add(layers.Dense(1024, "relu", name=f"hidden{number}"))
    model.add(layers.Dense(_CLASSES, name="head"))
    return model


def _blocks(x: Any, width: int) -> Any:
    """Four blocks of a transformer with four heads, applied to tokens of this width."""
    from keras import layers

    for number in range(4):
        y = layers.LayerNormalization(name=f"norm{number}_0")(x)
        x = x + layers.MultiHeadAttention(4, width // 4, name=f"attention{number}")(y, y)
        y = layers.LayerNormalization(name=f"norm{number}_1")(x)
        y = layers.Dense(4 * width, "relu", name=f"wide{number}")(y)
        x = x + layers.Dense(width, name=f"narrow{number}")(y)
    return x


def transformer() -> Any:
    """Transformer of four blocks with 3.2 million weights."""
    from keras import Input, Model, layers

    inputs = Input((16, 256))
    x = _blocks(inputs, 256)
    outputs = layers.Dense(_CLASSES, name="head")(layers.GlobalAveragePooling1D(name="mean")(x))
    return Model(inputs, outputs)


def cnn() -> Any:
    """Convolutions and dense layers for images of digits, with 1.1 million weights."""
    from keras import Input, Sequential, layers

    model = Sequential([Input((8, 8, 1))])
    for number, channels in enumerate((16, 32)):
        model.add(layers.Conv2D(channels, 3, padding="same", activation="relu", name=f"c{number}"))
    model.add(layers.Flatten(name="flat"))
    model.add(layers.Dense(512, "relu", name="hidden"))
    model.add(layers.Dense(_CLASSES, name="head"))
    return model


def rows_transformer() -> Any:
    """Transformer of four blocks with 0.8 million weights, for the rows of images of digits."""
    from keras import Input, Model, layers

    inputs = Input((8, 8))
    x = _blocks(layers.Dense(128, name="pixels")(inputs), 128)
    outputs = layers.Dense(_CLASSES, name="head")(layers.Flatten(name="flat")(x))
    return Model(inputs, outputs)


MODELS = {"mlp": (mlp, (64,)), "vgg": (vgg, (32, 32, 3)), "transformer": (transformer, (16, 256))}
"""Model functions by name, each with the shape of a sample."""


OF_DIGITS = {
    "mlp": (mlp, (64,)),
    "cnn": (cnn, (8, 8, 1)),
    "transformer": (rows_transformer, (8, 8)),
}
"""The same for the images of digits."""


def digit_images(shape: Sequence[int]) -> isotrain.DataSet:
    """Images of digits, float32 of this shape, and labels: every second one is for the evaluation."""
    images, labels = digits.images()
    inputs = images.astype(np.float32).reshape((-1, *shape))
    return isotrain.DataSet((inputs[1::2], labels[1::2]), (inputs[::2], labels[::2]))


def data(shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Samples, float32 `[4096, *shape]`, and labels, int64 `[4096]`."""
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((_SAMPLES, *shape), np.float32)
    return inputs, draw.integers(0, _CLASSES, _SAMPLES)


@dataclass(frozen=True)
class Sizes:
    """Size of the training: model, batches and steps.

    Attributes:
        model: Name of the model.
        backend: Backend as `isotrain.launch` takes it.
        steps: Number of steps that are measured.
        batch: Samples of a global batch.
        accumulate: Micro-batches of each.
        digits: Whether to learn the images of digits, from the first step on.
    """

    model: str = "mlp"
    backend: str = "torch-ddp"
    steps: int = 16
    batch: int = 32
    accumulate: int = 1
    digits: bool = False

    def spec(self, strategy: str) -> dict[str, Any]:
        """The spec of one run."""
        model, shape = (OF_DIGITS if self.digits else MODELS)[self.model]
        fields = IN_PARTS.get(strategy, {})
        learning = {
            "data": digit_images,
            "metrics": ["accuracy"],
            "optimizer": {"name": "adam", "lr": 0.0009765625},
        }
        return {
            "name": "links",
            "model": model,
            "data": data,
            "data_args": {"shape": shape},
            "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
            "optimizer": {"name": "sgd", "lr": 0.015625},
            "global_batch_size": self.batch,
            "gradient_accumulation_steps": self.accumulate,
            "steps": _ALL_STEPS,
            "strategy": name_with_options("data-parallel" if fields else strategy),
            "threads": 1,
            "device": "cpu",
            **fields,
            **(learning if self.digits else {}),
        }


@dataclass(frozen=True)
class Row:
    """Measurements of a strategy.

    Attributes:
        strategy: Strategy as requested.
        sent: Bytes that left a host in a step.
        sent_by_last: Bytes that left the last host.
        predicted: Bytes of the plan; None: it tells nothing of hosts.
        seconds: Mean duration of a step; with `planned` the median, as the times of layers are.
        accuracy: Part of the images of digits that are told right; None where it learns none.
        planned: Seconds of a step that the planner predicts for a pipeline, by `pipeline`, and for data
            parallelism in its place, by `data-parallel`; empty for other strategies.
    """

    strategy: str
    sent: float
    sent_by_last: float
    predicted: float | None
    seconds: float
    accuracy: float | None
    planned: dict[str, float]


def measured(network: Any, slots: int, strategies: Sequence[str], sizes: Sizes) -> list[Row]:
    """Trains under each strategy in turn, in the same processes.

    Args:
        network: Network of the hosts.
        slots: Number of processes on each host.
        strategies: Strategies in the form of `--strategy`.
        sizes: Size of the training.
    """
    told = {"strategies": strategies, "sizes": vars(sizes)}
    hosts, log = network.hosts, network.folder / "log"
    common: dict[str, Any] = {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": 29500}
    common |= {"WORLD_SIZE": len(hosts) * slots, "LOCAL_WORLD_SIZE": slots}
    common |= {"TORCHELASTIC_RUN_ID": _JOB, "OMP_NUM_THREADS": 1}
    command = [sys.executable, "-m", "benchmarks.links", "--take-part", json.dumps(told)]
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    ranks = []
    for rank in range(len(hosts) * slots):
        node, local = divmod(rank, slots)
        own = {**common, "RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node}
        variables = {**path, **{name: str(value) for name, value in own.items()}}
        ranks.append(hosts[node].start(command, log, variables))
    statuses = [process.wait() for process in ranks]
    assert not any(statuses), log.read_text()
    rows = json.loads((network.folder / _JOB).read_text())
    return [Row(*row) for row in rows]


def _take_part(strategies: Sequence[str], sizes: Sizes) -> None:
    """The work of every rank."""
    rows = [[strategy, *_trained(strategy, sizes)] for strategy in strategies]
    if os.environ["RANK"] == "0":
        Path(_JOB).write_text(json.dumps(rows))


def _trained(strategy: str, sizes: Sizes) -> tuple[Any, ...]:
    """The rest of a row."""

    def work(session: isotrain.Session) -> tuple[Any, ...]:
        planned = _planned(session)
        batches = session.batches()
        for _ in range(0 if sizes.digits else _WARM_STEPS):
            session.step(next(batches))
        session.barrier()
        began, before, ends = time.monotonic(), _sent(), []
        for _ in range(sizes.steps):
            session.step(next(batches))
            ends.append(time.monotonic())
        session.barrier()
        sent, seconds = _sent() - before, (time.monotonic() - began) / sizes.steps
        if planned:
            seconds = statistics.median(end - start for start, end in pairwise([began, *ends]))
        accuracy = session.evaluate()["accuracy"] if sizes.digits else None
        predicted = _predicted(session.plan)
        return sent / sizes.steps, seconds, predicted, accuracy, planned

    with TemporaryDirectory() as folder:
        found = isotrain.launch(
            work,
            sizes.spec(strategy),
            backend=sizes.backend,
            output=Path(folder) / "run",
            on_event=lambda event: None,
        )
    sent, seconds, predicted, accuracy, planned = zip(*found, strict=True)
    return statistics.mean(sent), sent[-1], predicted[0], max(seconds), accuracy[0], planned[0]


def _planned(session: isotrain.Session) -> dict[str, float]:
    """See `Row.planned`. All ranks time the layers at once: hosts share caches and memory, as in steps."""
    found = {}
    gigabits = session.plan.strategy_options.get("gigabits")
    if session.plan.strategy == "pipeline" and gigabits:
        group: Any = session.group
        session.barrier()
        profile = group.profile_layers(next(session.batches()))
        plan = session.strategy.pipeline_plan(profile, 0, session.plan)
        assert plan is not None
        micro_batches = session.plan.gradient_accumulation_steps
        replicas = Partitioner(profile, gigabits * 1e9 / 8, micro_batches)
        each = replicas.stage_seconds(0, profile.whole, len(plan.drawing))
        found = {"pipeline": plan.step_seconds, "data-parallel": micro_batches * each}
    session.barrier()
    session.seek(0)
    return found


def _predicted(plan: isotrain.Plan) -> float | None:
    """Bytes that leave each host in a step, by the plan; None: it does not tell."""
    if plan.strategy == "hierarchical":  # an all-reduce of one replica of each host
        hosts = len({process.host for process in plan.processes})
        return 2 * (hosts - 1) / hosts * (plan.gradient_bytes or 0)
    return None if plan.strategy == "pipeline" else plan.exchanged_bytes_per_step


def _sent() -> int:
    """Bytes that have left this host by its interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            return int(counts.split()[8])
    raise AssertionError("this host has no interface eth0")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2, help="processes of each host")
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--slow-mbit", type=int, help="rate of the last host's link")
    parser.add_argument("--strategy", action="append", help=f"default: {', '.join(STRATEGIES)}")
    parser.add_argument("--model", choices=sorted({*MODELS, *OF_DIGITS}), default=Sizes.model)
    parser.add_argument("--digits", action="store_true", help="learn digits")
    parser.add_argument("--backend", default=Sizes.backend)
    parser.add_argument("--steps", type=int, default=Sizes.steps)
    parser.add_argument("--batch", type=int, default=Sizes.batch)
    parser.add_argument("--accumulate", type=int, default=Sizes.accumulate)
    parser.add_argument("--take-part", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.take_part:
        told = json.loads(given.take_part)
        _take_part(told["strategies"], Sizes(**told["sizes"]))
        return
    from cluster.network import Network

    sizes = Sizes(
        given.model, given.backend, given.steps, given.batch, given.accumulate, given.digits
    )
    available = OF_DIGITS if given.digits else MODELS
    if given.model not in available:
        parser.error(f"--model: expected one of {', '.join(available)}, received {given.model}")
    names = [f"node{number}" for number in range(1, given.hosts + 1)]
    with TemporaryDirectory(dir="/tmp") as folder, Network(Path(folder), names) as network:
        network.shape(given.mbit)
        if given.slow_mbit:
            network.shape(given.slow_mbit, network.hosts[-1:])
        rows = measured(network, given.slots, given.strategy or STRATEGIES, sizes)
    _print(rows)


def _print(rows: Sequence[Row]) -> None:
    planned: dict[str, float] = next((row.planned for row in rows if row.planned), {})
    print(
        "| strategy | left a host, MB a step | left the last one | predicted | times less | step, ms"
        " | predicted | times as fast | accuracy |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        predicted = "" if row.predicted is None else f"{row.predicted / 1e6:.3f}"
        accuracy = "" if row.accuracy is None else f"{row.accuracy:.3f}"
        less, faster = rows[0].sent / row.sent, rows[0].seconds / row.seconds
        step = row.planned.get("pipeline")
        if row.strategy == "data-parallel":
            step = planned.get("data-parallel")
        cells = (
            *(row.strategy, f"{row.sent / 1e6:.3f}", f"{row.sent_by_last / 1e6:.3f}"),
            *(predicted, f"{less:.1f}"),
            *(f"{row.seconds * 1e3:.1f}", "" if step is None else f"{step * 1e3:.0f}"),
            *(f"{faster:.1f}", accuracy),
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
