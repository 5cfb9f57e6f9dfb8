"""What the conformance kit does not ask of the TensorFlow replica groups, against one replica alone.

Run as a program, this file is one process of a run: it makes every check on groups of that run and
writes which of them failed. The tests start those processes once per backend and number of replicas.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.adapters.tensorflow.adapter import TFMirrored, TFMultiWorker, tensorflow_environment
from isotrain.core.contracts.plan import Setting
from isotrain.core.contracts.process import VARIABLE, ProcessContext, from_variables
from isotrain.core.data.batches import Batch, Loader, Slice, as_dataset
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.spec.training_spec import TrainingSpec

ADAPTERS = {"tf-mirrored": TFMirrored, "tf-multiworker": TFMultiWorker}
RUNS = [("tf-mirrored", 2), ("tf-multiworker", 3)]
Check = Callable[["Run"], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Makes a function one of the checks of every run."""
    CHECKS[function.__name__] = function
    return function


class Run:
    """One process's share of a run: makes groups of all replicas, and of one replica alone."""

    def __init__(self, backend: str, context: ProcessContext, start_timeout: float) -> None:
        self._timeouts = {"start": start_timeout}
        self.adapter = ADAPTERS[backend]()
        self.context = context
        self.replicas = context.replicas
        self._first: Any = None

    def group(self, **fields: Any) -> Any:
        """A group of all replicas; the first starts the backend, the others share its strategy."""
        from isotrain.adapters.tensorflow.group import TensorFlowReplicaGroup

        spec = make_spec(**fields, timeouts=self._timeouts)
        if self._first is None:
            collective = self.adapter.resolve_collective(None, device="cpu", replicas=self.replicas)
            self._first = self.adapter.start(
                spec, Setting(collective, "cpu", 1, {}, 60.0), self.context
            )
            return self._first
        return TensorFlowReplicaGroup(spec, self._first.strategy, self._first._exchange)

    def alone(self, **fields: Any) -> Any:
        """A group of one replica in this process."""
        import tensorflow as tf

        from isotrain.adapters.tensorflow.exchange import SingleReplica
        from isotrain.adapters.tensorflow.group import TensorFlowReplicaGroup

        return TensorFlowReplicaGroup(
            make_spec(**fields), tf.distribute.get_strategy(), SingleReplica()
        )

    def own(self, make: Callable[[int], Any]) -> list[Any]:
        """What `make` gives for each replica of this process."""
        return [make(replica) for replica in self.context.local_replicas]

    def close(self) -> None:
        self._first.close()


def make_spec(**fields: Any) -> TrainingSpec:
    """A spec of a small regression in float64, with some fields changed."""
    defaults: dict[str, Any] = {
        "model": dense_model,
        "data": as_dataset(regression()),
        "loss": "mean_squared_error",
        "metrics": ["mean_absolute_error"],
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "global_batch": 8,
        "steps": 5,
        "precision": "float64",
    }
    if "objective" in fields:
        defaults["loss"] = None
    return TrainingSpec(**(defaults | fields))


def regression(samples: int = 23, dtype: str = "float64") -> Any:
    generator = np.random.default_rng(7)
    inputs = generator.standard_normal((samples, 4)).astype(dtype)
    return inputs, generator.standard_normal((samples, 3)).astype(dtype)


def tokens(samples: int = 23) -> Any:
    """Few distinct tokens, so that indices occur often in one batch and across replicas."""
    generator = np.random.default_rng(5)
    return (
        generator.integers(0, 3, (samples, 4)).astype("int64"),
        generator.standard_normal((samples, 3)),
    )


def dense_model() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(5, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(3),
        ]
    )


def embedding_model() -> Any:
    import keras

    return keras.Sequential(
        [
            keras.Input((4,), dtype="int64"),
            keras.layers.Embedding(6, 5),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def any_length_model() -> Any:
    import keras

    inputs = keras.Input((None, 4))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.ops.mean(inputs, axis=1)))


def tensorflow_module() -> Any:
    import tensorflow as tf

    class Affine(tf.Module):
        def __init__(self) -> None:
            super().__init__(name="affine")
            start = np.arange(12.0).reshape(4, 3) / 10
            self.weight = tf.Variable(start, name="weight")
            self.seen = tf.Variable(tf.zeros((), tf.float64), trainable=False, name="seen")

        def __call__(self, inputs: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign_add(tf.reduce_mean(inputs))
            return inputs @ self.weight

    return Affine()


def squares(model: Any, batch: Any) -> Any:
    """An objective: losses per sample, and the predictions."""
    import keras

    inputs, targets = batch
    predictions = model(inputs)
    return keras.ops.mean((predictions - targets) ** 2, axis=-1), predictions


def batches(group: Any, samples: Any, global_batch: int, accumulate: int = 1) -> list[Batch]:
    """The batches of two epochs for the replicas of this process."""
    loader = Loader(
        as_dataset(samples).train,
        global_batch=global_batch,
        replicas=group.replicas,
        local_replicas=group.local_replicas,
        seed=1,
        shuffle=True,
        drop_remainder=False,
        accumulate=accumulate,
        epochs=2,
        place=group.place,
    )
    return list(loader)


def train(group: Any, samples: Any, global_batch: int, accumulate: int = 1) -> list[float]:
    """Trains with a rate that changes; returns the losses."""
    return [
        float(group.synchronised_step(batch, 0.125 if batch.step < 3 else 0.0625))
        for batch in batches(group, samples, global_batch, accumulate)
    ]


def assert_same_state(one: Any, other: Any, tolerance: float) -> None:
    left, right = one.read_state(), other.read_state()
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], tolerance, tolerance, err_msg=name)


def assert_replicas_agree(group: Any) -> None:
    """Every copy of every weight and slot has the same bits on every replica of the run."""
    from isotrain.adapters.tensorflow.state import copies

    for name, variable in group._program.state._variables.items():
        values = [group.tensor(copy.numpy()) for copy in copies(variable)]
        if len(values) == 1 < len(group.local_replicas):
            continue
        gathered = group.numpy(group.all_gather(values)[0])
        assert (gathered == gathered[0]).all(), name


STEPS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "sgd, even": (6, 1, {}),
    "sgd, fewer samples than replicas": (1, 1, {}),
    "adam, uneven": (7, 1, {"optimizer": {"name": "adam", "lr": 0.125}}),
    "adamw, accumulated, clipped by global norm": (
        7,
        2,
        {
            "optimizer": {"name": "adamw", "lr": 0.125, "weight_decay": 0.25},
            "clip": {"global_norm": 0.125},
        },
    ),
    "sgd, clipped by norm": (7, 1, {"clip": {"norm": 0.125}}),
    "rmsprop, accumulated evenly, clipped by value": (
        12,
        2,
        {"optimizer": {"name": "rmsprop", "lr": 0.125}, "clip": {"value": 0.03125}},
    ),
    "objective": (7, 1, {"objective": squares}),
    "tf.Module": (7, 1, {"model": tensorflow_module}),
}
"""Samples of a global batch, accumulation, and fields of the spec."""


@check
def steps_equal_those_of_one_replica(run: Run) -> None:
    for name, (global_batch, accumulate, fields) in STEPS.items():
        group, alone = run.group(**fields), run.alone(**fields)
        losses = train(group, regression(), global_batch, accumulate)
        expected = train(alone, regression(), global_batch, accumulate)
        np.testing.assert_allclose(losses, expected, 1e-12, 1e-12, err_msg=name)
        assert_same_state(group, alone, 1e-11)
        assert_replicas_agree(group)
        metrics, expected_metrics = (each.collect_metrics("train") for each in (group, alone))
        assert metrics == pytest.approx(expected_metrics, rel=1e-12), name


@check
def repeated_embedding_indices_are_summed(run: Run) -> None:
    fields = {"model": embedding_model, "optimizer": {"name": "adam", "lr": 0.125}}
    group, alone = run.group(**fields), run.alone(**fields)
    np.testing.assert_allclose(train(group, tokens(), 7), train(alone, tokens(), 7), 1e-12)
    assert_same_state(group, alone, 1e-11)


@check
def gradients_reduced_by_hand_make_the_same_step(run: Run) -> None:
    fields = {"clip": {"global_norm": 0.125}}
    group, native = run.group(**fields), run.group(**fields)
    for batch in batches(group, regression(), 7):
        gradients, loss = group.gradients(batch)
        weights = range(len(gradients[0]))
        means = [group.all_reduce([own[w] for own in gradients], "mean") for w in weights]
        group.apply([[mean[r] for mean in means] for r in range(len(gradients))], 0.125)
        assert float(loss) == pytest.approx(float(native.synchronised_step(batch, 0.125)))
    assert_same_state(group, native, 1e-12)


@check
def slices_of_different_shapes_meet(run: Run) -> None:
    """Each replica's slices have a length of their own, so that processes trace at other steps."""
    group, alone = run.group(model=any_length_model), run.alone(model=any_length_model)
    generator = np.random.default_rng(3)
    for step in range(4):
        parts = []
        for replica in range(run.replicas):
            length = 2 + (replica if step < 2 else 0) + (step if replica == 0 else 0)
            inputs = np.repeat(generator.standard_normal((2, 1, 4)), length, axis=1)
            parts.append((inputs, generator.standard_normal((2, 3))))
        whole = (
            np.concatenate([i[:, :1] for i, _ in parts]),
            np.concatenate([t for _, t in parts]),
        )
        slices = tuple(
            run.own(lambda r, parts=parts: (Slice(*map(group.place, parts[r]), 2, 1.0),))
        )
        size = 2 * run.replicas
        loss = group.synchronised_step(Batch(0, step, step, size, False, True, slices), 0.125)
        single = ((Slice(*map(alone.place, whole), size, 1.0),),)
        expected = alone.synchronised_step(Batch(0, step, step, size, False, True, single), 0.125)
        assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    assert_same_state(group, alone, 1e-12)


@check
def float16_skips_a_step_that_overflows(run: Run) -> None:
    fields = {"precision": "float16", "loss_scale": {"initial": 1024.0, "growth_steps": 2}}
    group, alone = run.group(**fields), run.alone(**fields)
    inputs, targets = regression(6, "float32")
    broken = inputs.copy()
    broken[-1] = np.inf
    for each in (group, alone):
        usual, odd = batches(each, (inputs, targets), 6)[0], batches(each, (broken, targets), 6)[0]
        each.synchronised_step(usual, 0.125)
        before = each.read_state(["trainable"])
        each.synchronised_step(odd, 0.125)
        after = each.read_state(["trainable"])
        assert all((before[name] == after[name]).all() for name in before)
        each.synchronised_step(usual, 0.125)
        each.synchronised_step(usual, 0.125)
    state, expected = group.read_state(), alone.read_state()
    (scale,) = [name for name in state if name.endswith("dynamic_scale")]
    assert state[scale] == expected[scale] == 1024.0
    assert_replicas_agree(group)
    assert_same_state(group, alone, 5e-3)


@check
def bfloat16_trains(run: Run) -> None:
    group, alone = run.group(precision="bfloat16"), run.alone(precision="bfloat16")
    samples = regression(24, "float32")
    np.testing.assert_allclose(train(group, samples, 6), train(alone, samples, 6), 3e-2)
    assert_replicas_agree(group)


def main(backend: str, context_text: str, report: str, start_timeout: str = "60.0") -> None:
    """One process of a run: makes every check and writes the failures."""
    context = from_variables({VARIABLE: context_text})
    assert context is not None
    run = Run(backend, context, float(start_timeout))
    failures = {}
    for name, function in CHECKS.items():
        try:
            function(run)
        except Exception:
            failures[name] = traceback.format_exc()
    run.close()
    Path(report).write_text(json.dumps(failures), encoding="utf-8")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def contexts(backend: str, replicas: int) -> list[ProcessContext]:
    """The processes of a run on this machine."""
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(replicas))
    if backend == "tf-mirrored":
        return [ProcessContext(0, 1, 0, 1, replicas, tuple(range(replicas)), addresses, "")]
    return [
        ProcessContext(rank, replicas, rank, replicas, replicas, (rank,), addresses, "")
        for rank in range(replicas)
    ]


def start(backend: str, context: ProcessContext, *arguments: str) -> subprocess.Popen[str]:
    share = len(context.local_replicas)
    variables = os.environ | tensorflow_environment("cpu", share)
    text = context.to_variables()[VARIABLE]
    command = [sys.executable, __file__, backend, text, *arguments]
    return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, str]]:
    """Runs all checks of a backend once, and gives what failed by the name of the check."""
    known: dict[tuple[str, int], dict[str, str]] = {}

    def of(backend: str, replicas: int) -> dict[str, str]:
        if (backend, replicas) not in known:
            folder = tmp_path_factory.mktemp("run")
            known[backend, replicas] = _run_all(backend, replicas, folder)
        return known[backend, replicas]

    return of


def _run_all(backend: str, replicas: int, folder: Path) -> dict[str, str]:
    processes = [
        start(backend, context, str(folder / f"{context.rank}.json"))
        for context in contexts(backend, replicas)
    ]
    found: dict[str, str] = {}
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, (
                f"rank {rank} ended with {process.returncode}:\n{errors}"
            )
            reported = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
            for name, text in reported.items():
                found[name] = found.get(name, "") + f"\nrank {rank}:\n{text}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def test_collectives_that_cannot_work_are_refused() -> None:
    for adapter in (TFMirrored(), TFMultiWorker()):
        with pytest.raises(UnsupportedError, match="CPUs"):
            adapter.resolve_collective("nccl", device="cpu", replicas=2)
        with pytest.raises(UnsupportedError, match="unknown collective 'gloo'"):
            adapter.resolve_collective("gloo", device="cpu", replicas=2)
        assert adapter.resolve_collective("auto", device="gpu", replicas=2) == "nccl"
    assert TFMultiWorker().resolve_collective(None, device="cpu", replicas=2) == "ring"
    assert TFMirrored().resolve_collective(None, device="cpu", replicas=3) == "one-device"
    with pytest.raises(UnsupportedError, match="odd number"):
        TFMirrored().resolve_collective("hierarchical-copy", device="cpu", replicas=3)


def test_options_are_checked() -> None:
    def remarks(options: dict[str, Any]) -> list[str]:
        spec = make_spec(backend_options={"tf-multiworker": options})
        return TFMultiWorker().check(spec, replicas=2)

    assert len(remarks({"bucket_bytes": 1024})) == 1
    with pytest.raises(PlanError, match="at least 1, got 0"):
        remarks({"bucket_bytes": 0})
    with pytest.raises(PlanError, match="bucket_bytes"):
        remarks({"bucket_byte": 1024})


@pytest.mark.slow
def test_a_peer_that_never_starts_ends_the_process() -> None:
    process = start("tf-multiworker", contexts("tf-multiworker", 2)[0], "unused", "4.0")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "multi_worker_strategy" in errors, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_group(
    backend: str, replicas: int, name: str, failures: Callable[[str, int], dict[str, str]]
) -> None:
    found = failures(backend, replicas)
    assert name not in found, found[name]


if __name__ == "__main__":
    main(*sys.argv[1:])
