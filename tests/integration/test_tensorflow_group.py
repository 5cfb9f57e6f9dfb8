"""What the conformance kit does not ask of the TensorFlow replica groups, against one replica alone.

All checks of a backend are made in one run: each on new groups of its replicas. What they are compared
with, one replica alone finds in process 0 of the first run. Run as a program, this file is one process of a
run whose other process never comes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import isotrain
from isotrain.adapters.tensorflow.adapter import (
    TFMirrored,
    TFMultiWorker,
    tensorflow_environment_variables,
)
from isotrain.core.contracts.plan import BackendConfig
from isotrain.core.contracts.process import Peer, ProcessContext, from_variables
from isotrain.core.contracts.state import MODEL_STATE, StateKind
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.dataset import as_dataset
from isotrain.core.data.loader import Loader
from isotrain.core.errors import PlanError, UnsupportedError
from isotrain.core.launching.processes.ports import Ports
from isotrain.core.spec.loading import load_spec
from isotrain.testing import launching
from isotrain.testing.check_context import assert_same
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session
from isotrain.testing.file_exchange import FileExchange

RUNS = [("tf-mirrored", 2), ("tf-multiworker", 2)]
STATE: tuple[StateKind, ...] = (*MODEL_STATE, "loss-scale")
Found = dict[str, Any]
Work = Callable[[Any], Found]
Check = Callable[["Run"], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Makes a function one of the checks of every run."""
    CHECKS[function.__name__] = function
    return function


class Run:
    """One process's share of a run, in which work is done on one group after the other.

    Attributes:
        session: The newest.
        alone: What one replica alone has found, by check and number of the comparison.
    """

    def __init__(self, session: isotrain.Session, alone: dict[str, Found]) -> None:
        self.session = session
        self.alone = alone
        self._check, self._groups, self._compared = "", 0, 0

    def begin(self, check: str) -> None:
        """Says which check is made from here on."""
        self._check, self._compared = check, 0

    def together(self, work: Work, **fields: Any) -> Found:
        """What work finds on a new group of all replicas; it is the same on all, to the bit."""
        self._groups += 1
        with next_session(self.session, str(self._groups), make_spec(**fields)) as session:
            self.session = session
            found, group = work(session.group), session.group
            board = FileExchange(session.run_directory, session.rank, len(session.plan.processes))
            rows = board.all_gather_rows([group.numpy(row) for row in group.compute(whole_state)])
            losses = board.all_gather({n: np.array(v) for n, v in found["losses"].items()})
            found["state"] = group.read_state(STATE)
        for replica, row in enumerate(rows):
            assert_same(row, rows[0], f"state of replica {replica}")
        for rank, own in enumerate(losses):
            assert_same(own, losses[0], f"losses of process {rank}")
        return found

    def assert_as_alone(self, found: Found, work: Work, tolerance: float, **fields: Any) -> None:
        """Compares with what the same work finds on one replica; process 0 does, for all are equal."""
        if self.session.rank > 0:
            return
        self._compared += 1
        name = f"{self._check} {self._compared}"
        if name not in self.alone:
            threads = len(self.session.group.local_replicas)  # of a process, set once
            spec, backend = make_spec(**fields, threads=threads), self.session.plan.backend
            with isotrain.open_session(spec, backend=backend, replicas=1) as alone:
                self.alone[name] = {**work(alone.group), "state": alone.read_state(STATE)}
        expected = self.alone[name]
        assert found.keys() == expected.keys()
        assert found["state"].keys() == expected["state"].keys()
        for kind, values in found.items():
            for part, value in values.items():
                np.testing.assert_allclose(
                    value, expected[kind][part], tolerance, tolerance, err_msg=f"{kind} {part}"
                )


def whole_state(replica: Any) -> Any:
    """A computation: all that the replica has, in one vector."""
    return replica.read(("trainable", "statistics", "momenta"))


def make_spec(**fields: Any) -> dict[str, Any]:
    """A spec of a small regression in float64, with some fields changed."""
    defaults: dict[str, Any] = {
        "model": dense_model,
        "data": regression,
        "loss": "mean_squared_error",
        "metrics": ["mean_absolute_error"],
        "optimizer": {"name": "sgd", "lr": 0.125, "momentum": 0.5},
        "global_batch_size": 8,
        "steps": 5,
        "precision": "float64",
        "threads": 1,
        "timeouts": LONG_TIMEOUTS,
    }
    return defaults | fields


def regression(samples: int = 21, dtype: str = "float64") -> Any:
    generator = np.random.default_rng(7)
    inputs = generator.standard_normal((samples, 4)).astype(dtype)
    return inputs, generator.standard_normal((samples, 3)).astype(dtype)


def tokens(samples: int = 21) -> Any:
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


def module_of_its_own() -> Any:
    """A module that is another one in each process, in variables of several types."""
    import tensorflow as tf

    place = from_variables(os.environ)
    assert place is not None
    module, number = tf.Module(), place.rank + 1
    module.weight = tf.Variable(tf.fill([4, 3], tf.constant(number / 3, tf.float64)))
    starts: list[Any] = [np.float32([-0.0, np.nan, 3e38]) / number, number, number == 1, []]
    module.others = [tf.Variable(start, trainable=False) for start in starts]
    module.__class__ = type("Own", (tf.Module,), {"__call__": lambda self, x: x @ self.weight})
    return module


def batches(
    group: Any, samples: Any, global_batch_size: int, gradient_accumulation_steps: int = 1
) -> list[Batch]:
    """The batches of two epochs for the replicas of this process."""
    loader = Loader(
        as_dataset(samples).train,
        global_batch_size=global_batch_size,
        replicas=group.replicas,
        local_replicas=group.local_replicas,
        seed=1,
        shuffle=True,
        drop_remainder=False,
        gradient_accumulation_steps=gradient_accumulation_steps,
        epochs=2,
        to_device=group.to_device,
    )
    return list(loader)


def train(
    group: Any,
    samples: Callable[[], Any],
    global_batch_size: int,
    gradient_accumulation_steps: int = 1,
) -> Found:
    """Trains with a rate that changes; gives losses and metrics."""
    losses = {
        f"step {step}": float(group.synchronous_step(batch, 0.125 if step < 3 else 0.0625))
        for step, batch in enumerate(
            batches(group, samples(), global_batch_size, gradient_accumulation_steps)
        )
    }
    return {"losses": losses, "metrics": group.collect_metrics("train")}


STEPS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "sgd, clipped by norm, uneven": (7, 1, {"clip": {"norm": 0.125}}),
    "rmsprop, accumulated evenly, clipped by value": (
        12,
        2,
        {"optimizer": {"name": "rmsprop", "lr": 0.125}, "clip": {"value": 0.03125}},
    ),
    "tf.Module": (7, 1, {"model": tensorflow_module}),
}
"""Samples of a global batch, accumulation, and fields of the spec."""


def first_values(group: Any) -> Found:
    return {"losses": {}, "bits": {n: v.tobytes() for n, v in group.read_state().items()}}


@check
def all_begin_with_the_values_of_replica_0(run: Run) -> None:
    found = run.together(first_values, model=module_of_its_own)["bits"]
    starts: list[Any] = [np.full((4, 3), 1 / 3), np.float32([-0.0, np.nan, 3e38]), np.int32(1)]
    bits = list(found.values())
    assert all(start.tobytes() in bits for start in [*starts, np.True_, np.float32([])])


@check
def steps_equal_those_of_one_replica(run: Run) -> None:
    for global_batch_size, gradient_accumulation_steps, fields in STEPS.values():
        work = functools.partial(
            train,
            samples=regression,
            global_batch_size=global_batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
        )
        run.assert_as_alone(run.together(work, **fields), work, 1e-12, **fields)


def train_by_xla(group: Any) -> Found:
    """Sees that each local replica's pass was translated."""
    import tensorflow as tf

    make, translated = tf.function, []

    def noted(*arguments: Any, **options: Any) -> Any:
        function = make(*arguments, **options)
        if options.get("jit_compile"):
            translated.append(function)
        return function

    with mock.patch.object(tf, "function", noted):
        found = train(group, samples=regression, global_batch_size=7)
    assert len(translated) >= len(group.local_replicas)
    assert all(function.experimental_get_tracing_count() for function in translated)
    return found


@check
def compiled_steps_equal_those_of_one_replica_that_are_not(run: Run) -> None:
    work = functools.partial(train, samples=regression, global_batch_size=7)
    run.assert_as_alone(run.together(train_by_xla, compile=True), work, 1e-12)


@check
def repeated_embedding_indices_are_summed(run: Run) -> None:
    fields = {
        "model": embedding_model,
        "data": tokens,
        "optimizer": {"name": "adam", "lr": 0.125},
    }
    work = functools.partial(train, samples=tokens, global_batch_size=7)
    run.assert_as_alone(run.together(work, **fields), work, 1e-12, **fields)


def by_hand(group: Any) -> Found:
    """Gradients are reduced by a collective, and applied."""
    losses = {}
    for batch in batches(group, regression(), 7):
        gradients, loss = group.gradients(batch)
        weights = range(len(gradients[0]))
        means = [group.all_reduce([own[w] for own in gradients], "mean") for w in weights]
        group.apply_gradients([[mean[r] for mean in means] for r in range(len(gradients))], 0.125)
        losses[f"step {batch.step}"] = float(loss)
    return {"losses": losses}


def native(group: Any) -> Found:
    """Sees that the loss travels with the gradients: 43 numbers, which go in one message."""
    import tensorflow as tf

    context, sent = tf.distribute.ReplicaContext, []
    exchange = context.all_reduce

    def noted(own: Any, op: Any, tensors: list[Any], *options: Any) -> Any:
        sent.append([tensor.shape.num_elements() for tensor in tensors])
        return exchange(own, op, tensors, *options)

    with mock.patch.object(context, "all_reduce", noted):
        steps = batches(group, regression(), 7)
        losses = {f"step {b.step}": float(group.synchronous_step(b, 0.125)) for b in steps}
    assert sent
    assert all(each == [44] for each in sent), sent
    return {"losses": losses}


@check
def gradients_reduced_by_hand_make_the_same_step(run: Run) -> None:
    found, expected = (run.together(w, clip={"global_norm": 0.125}) for w in (by_hand, native))
    for kind, values in expected.items():
        for name, value in values.items():
            np.testing.assert_allclose(found[kind][name], value, 1e-12, 1e-12, err_msg=name)


def update_by_the_norm_of_all(group: Any, norm: float) -> Found:
    """Updates with the same gradients on each replica, of which `norm` is said to be that of all."""
    shapes = [value.shape for value in group.read_state(("trainable",)).values()]
    own = [group.tensor(np.full(shape, 0.5)) for shape in shapes]
    group.shard_optimizer([range(len(shapes))])
    before = group.read_state(("trainable",))
    group.update_shard([own], 0.125, [group.tensor(np.array(norm))])
    after = group.read_state(("trainable",))
    return {"losses": {}, "factors": {n: (before[n] - after[n]) / (0.125 * 0.5) for n in before}}


@check
def gradients_are_clipped_by_the_norm_of_all_where_it_is_above_the_bound(run: Run) -> None:
    if len(run.session.group.local_replicas) > 1:
        return  # mirrored variables have no update of a replica's own
    for norm, factor in ((2.0, 0.25), (0.25, 1.0)):
        work = functools.partial(update_by_the_norm_of_all, norm=norm)
        found = run.together(work, clip={"global_norm": 0.5})
        for name, value in found["factors"].items():
            np.testing.assert_allclose(value, factor, 1e-12, err_msg=name)


def train_on_slices_of_all_lengths(group: Any, parts: int) -> Found:
    """Trains on as many slices; a group of one replica on the samples of all, which are equal in length."""
    generator, losses = np.random.default_rng(3), {}
    for step in range(4):
        drawn = [
            (generator.standard_normal((2, 1, 4)), generator.standard_normal((2, 3)))
            for _ in range(parts)
        ]
        slices = [
            (np.repeat(inputs, 2 + (part if step < 2 else 0) + (step if part == 0 else 0), 1), t)
            for part, (inputs, t) in enumerate(drawn)
        ]
        whole = tuple(np.concatenate(arrays) for arrays in zip(*drawn, strict=True))
        given = slices if group.replicas == parts else [whole]
        own = tuple(
            (Slice(*map(group.to_device, given[replica]), len(given[replica][1]), 1.0),)
            for replica in group.local_replicas
        )
        loss = group.synchronous_step(Batch(0, step, step, 2 * parts, False, True, own), 0.125)
        losses[f"step {step}"] = float(loss)
    assert group.is_on_device(own[0][0].targets)
    assert not group.is_on_device(given[0][1])
    assert not group.is_on_device(group.to_device(np.zeros(1, "f4"))), (
        "the model computes in float64"
    )
    return {"losses": losses}


@check
def slices_of_different_shapes_meet(run: Run) -> None:
    """Each replica's slices have a length of their own, so that processes trace at other steps."""
    work = functools.partial(train_on_slices_of_all_lengths, parts=run.session.replicas)
    found = run.together(work, model=any_length_model)
    run.assert_as_alone(found, work, 1e-12, model=any_length_model)


FLOAT16 = {"precision": "float16", "loss_scale": {"initial": 1024.0, "growth_steps": 2}}


def train_with_an_overflow(group: Any) -> Found:
    inputs, targets = regression(6, "float32")
    broken = inputs.copy()
    broken[-1] = np.inf
    usual, odd = (batches(group, (given, targets), 6)[0] for given in (inputs, broken))
    group.synchronous_step(usual, 0.125)
    before = group.read_state(["trainable"])
    group.synchronous_step(odd, 0.125)
    after = group.read_state(["trainable"])
    assert all((before[name] == after[name]).all() for name in before)
    group.synchronous_step(usual, 0.125)
    return {"losses": {"last": float(group.synchronous_step(usual, 0.125))}}


@check
def float16_skips_a_step_that_overflows(run: Run) -> None:
    found = run.together(train_with_an_overflow, **FLOAT16)
    assert found["state"]["loss-scale/scale"] == 1024.0
    run.assert_as_alone(found, train_with_an_overflow, 5e-3, **FLOAT16)


def train_in_bfloat16(group: Any) -> Found:
    return {"losses": train(group, lambda: regression(24, "float32"), 6)["losses"]}


@check
def bfloat16_trains(run: Run) -> None:
    found = run.together(train_in_bfloat16, precision="bfloat16")
    run.assert_as_alone(found, train_in_bfloat16, 3e-2, precision="bfloat16")


def masking_model() -> Any:
    import keras

    layers = keras.layers
    parts = [layers.Embedding(6, 5, mask_zero=True), layers.BatchNormalization(), layers.Dense(3)]
    return keras.Sequential([keras.Input((4,), dtype="int64"), *parts])


def masked_targets() -> Any:
    inputs, _ = tokens()
    return inputs, inputs[:, :, None] * np.ones(3)


@check
def gradients_computed_for_others_assign_to_no_variable(run: Run) -> None:
    """Nor does counting what a mask leaves: other workers may move the statistics meanwhile."""
    if run.session.rank > 0:
        return
    import tensorflow as tf

    threads = len(run.session.group.local_replicas)
    spec = make_spec(
        model=masking_model, data=masked_targets, gradient_accumulation_steps=2, threads=threads
    )
    with isotrain.open_session(spec, backend=run.session.plan.backend, replicas=1) as alone:
        pieces = [(piece.inputs, piece.targets) for piece in next(alone.batches()).slices[0]]
        program = alone.group.trainer  # type: ignore[attr-defined]

        def trace() -> Any:
            weights = tf.constant([0.5, 0.5], tf.float64)
            return program.stateless_contribution(pieces, weights, tf.constant([0, 0], tf.int64))

        assert program.has_own_denominator(pieces[0])
        graph = tf.function(trace, autograph=False).get_concrete_function().graph
        assert not [each.name for each in graph.get_operations() if "Assign" in each.type]


@check
def large_gradients_travel_alone_and_small_ones_together(run: Run) -> None:
    import tensorflow as tf

    from isotrain.adapters.tensorflow.comm.base import in_buckets

    counts, given = (1, 9, 2, 10, 3, 8, 7, 5, 4), []

    def reduce(packed: list[tf.Tensor]) -> list[tf.Tensor]:
        given.extend(packed)
        return [2 * each for each in packed]

    @tf.function(autograph=False)
    def twice(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return in_buckets(tensors, 4 * 18, reduce)

    tensors = [tf.range(100.0 * i, 100.0 * i + count) for i, count in enumerate(counts)]
    for found, tensor in zip(twice(tensors), tensors, strict=True):
        np.testing.assert_array_equal(found, 2 * tensor)
    assert [int(each.shape[0]) for each in given] == [1 + 2 + 3 + 8, 9, 10, 7 + 5 + 4]
    copied = [each.op.type for each in given]
    assert copied == ["ConcatV2", "Reshape", "Reshape", "ConcatV2"]


def updated_weights(dtype: str, nesterov: bool, at_once: bool) -> Any:
    """Makes a function that updates weights of a type by given gradients, and gives them and their slots."""
    import keras
    import tensorflow as tf

    from isotrain.adapters.tensorflow.trainer.optimizer import use_fused_sgd

    starts = [np.linspace(-1.5, 2.5, 33 * 7).reshape(33, 7), np.full(7, 1 / 3), np.float64(0.7)]
    weights = [keras.Variable(start.astype("float32"), dtype=dtype) for start in starts]
    optimizer = keras.optimizers.SGD(0.1, 0.9, nesterov, weight_decay=0.01)
    optimizer.build(weights)
    if at_once:
        use_fused_sgd(optimizer)

    def updated(gradients: Any) -> Any:
        optimizer.apply([tf.cast(each, dtype) for each in gradients], weights)
        return [tf.identity(variable.value) for variable in (*weights, *optimizer.momentums)]

    return updated


@check
def momenta_and_weights_updated_at_once_have_the_bits_of_keras(run: Run) -> None:
    if run.session.plan.backend != RUNS[0][0]:
        return
    import tensorflow as tf

    cases = [("float64", False), ("float32", False), ("float32", True), ("bfloat16", True)]
    generator, found = np.random.default_rng(3), []
    gradients = [tf.constant(generator.standard_normal(s)) for s in ((33, 7), (7,), ())]
    for at_once in (False, True):
        functions = [updated_weights(*case, at_once) for case in cases]
        every = tf.function(lambda given, f=functions: [each(given) for each in f], autograph=False)
        graph = every.get_concrete_function(gradients).graph
        done = [op for op in graph.get_operations() if op.type == "ResourceApplyKerasMomentum"]
        assert len(done) == len(gradients) * len(cases) * at_once
        steps = [every([each * factor for each in gradients]) for factor in (0.3, -0.7, 1.1)]
        found.append([each.numpy().tobytes() for each in tf.nest.flatten(steps)])
    assert found[0] == found[1]


@check
def isotrain_alone_finds_workers_silent(run: Run) -> None:
    """TensorFlow's own limit goes by the wall clock."""
    from tensorflow.python.eager import context

    config, direct = context.context().config.experimental.coordination_config, "no_grpc_proxy"
    if config.service_type:
        assert config.heartbeat_timeout_in_ms > 24 * 3600 * 1000
        assert os.environ[direct] == "elsewhere,127.0.0.1"
    else:
        assert run.session.plan.backend != "tf-multiworker"


def make_checks(session: isotrain.Session, alone: dict[str, Found]) -> tuple[Found, Found]:
    """Makes every check; what is wrong, by name, and what one replica has found. A run's work."""
    run, found = Run(session, alone), {}
    for name, function in CHECKS.items():
        run.begin(name)
        try:
            function(run)
        except Exception:
            found[name] = traceback.format_exc()
    return found, run.alone


@functools.cache
def launched(backend: str, replicas: int) -> launching.Run:
    """A run of a backend; all are compared with the one replica of the first."""
    first = RUNS[0]
    known = () if (backend, replicas) == first else launched(*first).returned
    alone = known[0][1] if known else {}
    work = functools.partial(make_checks, alone=alone)
    nowhere = "http://127.0.0.1:9"  # who goes through this proxy reaches nobody
    with mock.patch.dict(os.environ, http_proxy=nowhere, no_proxy="elsewhere"):
        return launching.try_run(work, make_spec(), backend, replicas)


def problems(backend: str, replicas: int) -> dict[str, str]:
    """What is wrong in a run of a backend, by the name of the check."""
    run = launched(backend, replicas)
    if run.failure is not None:
        return dict.fromkeys(CHECKS, run.failure)
    told = [(rank, *item) for rank, (found, _) in enumerate(run.returned) for item in found.items()]
    return {name: "".join(f"\nrank {r}:\n{t}" for r, n, t in told if n == name) for name in CHECKS}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(("backend", "replicas"), RUNS)
def test_group(backend: str, replicas: int, name: str) -> None:
    found = problems(backend, replicas)[name]
    assert not found, found


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
    def notes(options: dict[str, Any]) -> list[str]:
        spec = load_spec(make_spec(backend_options={"tf-multiworker": options}))
        adapter = TFMultiWorker()
        return adapter.check(spec, adapter.check_options(spec), replicas=2)

    assert len(notes({"bucket_bytes": 1024})) == 1
    with pytest.raises(PlanError, match="at least 1, received 0"):
        notes({"bucket_bytes": 0})
    with pytest.raises(PlanError, match="bucket_bytes"):
        notes({"bucket_byte": 1024})


@pytest.mark.slow
def test_a_peer_that_never_starts_ends_the_process() -> None:
    completed = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | tensorflow_environment_variables("cpu", 1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 1
    assert "multi_worker_strategy" in completed.stderr, completed.stderr


def wait_for_a_peer() -> None:
    """Starts the first process of two, and waits for the other for a second."""
    with contextlib.closing(Ports()) as ports:
        numbered = enumerate(ports.take(2))
        peers = tuple(Peer(r, "here", "127.0.0.1", port, r, (r,)) for r, port in numbered)
        context = ProcessContext(0, 2, "", peers)
        spec = load_spec(make_spec(timeouts={"start": 1.0}))
        TFMultiWorker().start(spec, BackendConfig("ring", "cpu", 1, {}, 60.0), context)


if __name__ == "__main__":
    wait_for_a_peer()
