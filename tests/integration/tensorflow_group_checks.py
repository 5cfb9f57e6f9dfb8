"""Checks of TensorFlow's replica groups, made one after the other in every run."""

from __future__ import annotations

import functools
import os
import traceback
from typing import Any
from unittest import mock

import numpy as np
from integration.tensorflow_group_run import (
    CHECKS,
    RUNS,
    STATE,
    Found,
    Run,
    any_length_model,
    batches,
    check,
    embedding_model,
    make_spec,
    module_of_its_own,
    regression,
    tensorflow_module,
    tokens,
    train,
)

import isotrain
from isotrain.core.data.batch import Batch, Slice

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
    """Slices of each replica have another length, so that processes trace at different steps."""
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


def keep_scaled_gradients(group: Any) -> Found:
    """Compares kept gradients of a step with those of its batch, both without the loss scale."""
    batch = batches(group, regression(6, "float32"), 6)[0]
    local_gradients, _ = group.gradients(batch)
    expected = [
        group.numpy(group.all_reduce(list(values), "mean")[0])
        for values in zip(*local_gradients, strict=True)
    ]
    assert group.keep_gradients()
    loss = float(group.synchronous_step(batch, 0.125))
    for kept in group.kept_gradients():
        for gradient, value in zip(map(group.numpy, kept), expected, strict=True):
            np.testing.assert_allclose(gradient, value, rtol=1e-2, atol=1e-3)
    return {"losses": {"first": loss}}


@check
def kept_gradients_are_divided_by_the_loss_scale(run: Run) -> None:
    run.together(keep_scaled_gradients, **FLOAT16)


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
    """Neither gradients for other processes nor counting a mask assigns to variables, as others may do."""
    if run.session.rank > 0:
        return
    import tensorflow as tf

    threads = len(run.session.group.local_replicas)
    spec = make_spec(
        model=masking_model, data=masked_targets, gradient_accumulation_steps=2, threads=threads
    )
    with isotrain.open_session(spec, backend=run.session.plan.backend, replicas=1) as alone:
        micro_batches = [
            (micro_batch.inputs, micro_batch.targets)
            for micro_batch in next(alone.batches()).slices[0]
        ]
        trainer = alone.group.trainer  # type: ignore[attr-defined]

        def trace() -> Any:
            weights = tf.constant([0.5, 0.5], tf.float64)
            return trainer.stateless_contribution(
                micro_batches, weights, tf.constant([0, 0], tf.int64)
            )

        assert trainer.has_own_denominator(micro_batches[0])
        graph = tf.function(trace, autograph=False).get_concrete_function().graph
        assert not [each.name for each in graph.get_operations() if "Assign" in each.type]


def _all_gather_shards(replica: Any, shard: Any) -> Any:
    return replica.all_gather_shards_within(shard, [1, 2], [[0, 1]])


def gather_negative_zeros(group: Any) -> Found:
    shards = [np.array([-0.0]), np.array([3.0, -0.0])]
    local = [group.tensor(shards[replica]) for replica in group.local_replicas]
    for joined in group.compute(_all_gather_shards, local):
        assert group.numpy(joined).tobytes() == np.concatenate(shards).tobytes()
    return {"losses": {}}


@check
def shards_in_subgroups_arrive_with_the_bits_as_sent(run: Run) -> None:
    run.together(gather_negative_zeros)


def step_locally_with_one_sample(group: Any) -> Found:
    """A local step with momenta, of which only replica 0 has a sample; zeros all state then, equal on all."""
    first, second = batches(group, regression(2), 2)[0], batches(group, regression(1), 1)[0]
    group.synchronous_step(first, 0.125)
    before = {r: group.read_state(("optimizer",), replica=r) for r in group.local_replicas}
    group.local_step(second, 0.125)
    for replica, state in before.items():
        after = group.read_state(("optimizer",), replica=replica)
        momenta = [name for name in state if "momentum" in name]
        changed = [name for name in momenta if (after[name] != state[name]).any()]
        assert changed == ([] if replica else momenta), (replica, changed)
    group.write_state({n: np.zeros_like(v) for n, v in group.read_state(STATE).items()})
    return {"losses": {}}


@check
def a_replica_without_samples_keeps_its_momenta(run: Run) -> None:
    run.together(step_locally_with_one_sample)


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
