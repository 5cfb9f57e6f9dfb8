"""Traces of programs of Keras and TensorFlow: where they part, and which fault of the zoo it is."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.program_zoo.keras_programs import KERAS_CLEAN, KERAS_PROGRAMS

from isotrain.analysis.program_trace.comparison import compare
from isotrain.analysis.program_trace.reading import ProgramTrace, read_trace
from isotrain.core.launching.processes.ports import Ports

pytestmark = pytest.mark.examples
SEEDS = 2
TESTS = Path(__file__).parents[1]
LOOP = """
import json, os, subprocess, sys
kind, divisor = sys.argv[1], int(sys.argv[2])
if kind == "workers":
    addresses = [f"localhost:{port}" for port in (PORTS)]
    children = []
    for index in range(2):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        command = [sys.executable, __file__, "worker", sys.argv[2]]
        children.append(subprocess.Popen(command, env={**os.environ, "TF_CONFIG": json.dumps(task)}))
    sys.exit(max(child.wait() for child in children))

import numpy as np
import tensorflow as tf

if kind == "worker":
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
else:
    count = int(kind)
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(cpu, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(count)])

import keras

keras.utils.set_random_seed(1)
draw = np.random.default_rng(0)
x, y = draw.normal(size=(48, 8)).astype("float32"), draw.integers(3, size=48)
with strategy.scope():
    layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    optimizer = keras.optimizers.SGD(0.1)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def train(inputs, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(inputs, training=True)) / divisor
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))


@tf.function
def step(inputs, labels):
    strategy.run(train, (inputs, labels))


data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
for _ in range(6):
    for inputs, labels in strategy.experimental_distribute_dataset(data.with_options(options)):
        step(inputs, labels)
"""
"""A loop under `tf.distribute`: its replicas or `workers`, and the divisor of its summed loss."""

KEYWORDS = """
import sys
import numpy as np
import tensorflow as tf
import keras

if sys.argv[1] == "True":
    tf.config.run_functions_eagerly(True)
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
optimizer = keras.optimizers.SGD(0.1)
for _ in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(np.array([[3.0, 4.0]], "float32"), training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    tf.clip_by_global_norm(gradients, 1.0, name="computed")
    gradients, _ = tf.clip_by_global_norm(gradients, 1.0, use_norm=tf.constant(2.0))
    optimizer.apply(gradients, trainable_variables=model.trainable_variables)
print("functions run eagerly:", tf.config.functions_run_eagerly())
"""
GRAPHS = """
import sys
import numpy as np
import tensorflow as tf
import keras

if sys.argv[1] == "eagerly":
    tf.config.run_functions_eagerly(True)
draw = np.random.default_rng(0)
x, y = draw.normal(size=(60, 8)).astype("float32"), draw.integers(3, size=60)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
calls = {}


def made(name, optimizer, is_nested=False, embeds=False, **options):
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense(16, "tanh", name="hidden")
    norms = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dropout(0.3, seed=3)]
    head = keras.layers.Dense(3, name="head")
    first = [keras.layers.Embedding(9, 4, name="rows"), keras.layers.Flatten()] if embeds else []
    model = keras.Sequential([keras.Input((8,)), *first, dense, *norms, head], name=name)

    def update(gradients):
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    if is_nested:
        update = tf.function(update)

    @tf.function(**options)
    def step(inputs, labels):
        calls[name] = calls.get(name, 0) + 1
        if embeds:
            inputs = tf.cast(2 * inputs, "int32") % 9
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(labels, model(inputs, training=True)))
        update(tape.gradient(loss, model.trainable_variables))

    return step


rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
steps = [
    made("graph", keras.optimizers.Adam(rate, global_clipnorm=0.5)),
    made("xla", keras.optimizers.SGD(0.1), jit_compile=True),
    made("accumulated", keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    made("branch", keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1, clipnorm=0.5))),
    made("nested", keras.optimizers.SGD(0.1), is_nested=True),
    made("rows", keras.optimizers.SGD(0.1, global_clipnorm=0.5), embeds=True),
]
for start in range(0, 60, 6):
    for step in steps:
        step(tf.constant(x[start : start + 6]), tf.constant(y[start : start + 6]))
print("calls:", *calls.values())
"""
"""Steps: a graph, by XLA, accumulating, updates in a branch, in a nested function, of rows of a weight."""

SAVED = """
import numpy as np
import tensorflow as tf
import keras

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)


@tf.function
def forward(x):
    return model(x)


class Served(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec((None, 4))])
    def serve(self, x):
        return forward(x)


x = tf.constant(np.random.rand(8, 4).astype("float32"))
for _ in range(3):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(forward(x))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    list(tf.data.Dataset.from_tensor_slices(x).batch(4).map(forward))
served = Served()
served.model = model
tf.saved_model.save(served, "saved", signatures=served.serve)
"""
"""A SavedModel that is written while steps are recorded; a function is called in `tf.data` too."""

HOROVOD = """
import sys
import numpy as np
import tensorflow as tf
import keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras

hvd.init()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
optimizer = keras.optimizers.SGD(0.1)
if sys.argv[1] == "optimizer":
    optimizer = horovod.tensorflow.keras.DistributedOptimizer(optimizer)
draw = np.random.default_rng(0)
for _ in range(3):
    inputs = draw.normal(size=(12, 8)).astype("float32")[hvd.rank() :: 2]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True)))
    if sys.argv[1] != "optimizer":
        tape = hvd.DistributedGradientTape(tape, compression=getattr(hvd.Compression, sys.argv[1]))
    gradients = tape.gradient(loss, [weight.value for weight in model.trainable_variables])
    optimizer.apply(gradients, model.trainable_variables)
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ProgramTrace]:
    """Traces by name; the programs run once, those of one process and those of two."""
    folder = tmp_path_factory.mktemp("zoo")
    record = [sys.executable, "-m", "integration.program_zoo.keras_recording", folder, str(SEEDS)]
    horovodrun = [Path(sys.executable).with_name("horovodrun"), "-np", "2"]
    for command in (record, [*horovodrun, *record]):
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(TESTS)}, check=True)
    return functools.cache(lambda name: read_trace(folder / f"keras-{name}"))


@pytest.mark.parametrize("name", KERAS_PROGRAMS)
def test_the_fault_of_each_program_is_named(
    trace: Callable[[str], ProgramTrace], name: str
) -> None:
    found = compare(trace(f"{name}-right"), trace(f"{name}-wrong"))
    assert not found.agree
    assert found.causes[0].code == KERAS_PROGRAMS[name].code, [c.evidence for c in found.causes]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", KERAS_CLEAN)
def test_programs_that_differ_by_rounding_agree(
    trace: Callable[[str], ProgramTrace], name: str, seed: int
) -> None:
    """One process and two; `fit` and a loop."""
    for one, other in itertools.permutations([trace(f"{name}-{seed}-{count}") for count in (1, 2)]):
        found = compare(one, other)
        assert found.agree, found.differences[0]
        assert found.steps == 4


def test_programs_are_traced_as_they_are(tmp_path: Path) -> None:
    """Functions of TensorFlow, also after the recorded steps; replicas in one process and in two."""
    script = tmp_path / "loop.py"
    with contextlib.closing(Ports()) as ports:
        script.write_text(LOOP.replace("PORTS", ", ".join(map(str, ports.take(2)))))
    for name, words in {"one": "1 12", "sum": "2 6", "workers": "workers 12"}.items():
        command = [
            sys.executable,
            "-m",
            "isotrain",
            "trace",
            "--output",
            name,
            "--",
            sys.executable,
        ]
        made = subprocess.run(
            [*command, script.name, *words.split()], cwd=tmp_path, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
        assert "not recorded" not in made.stderr
    one = read_trace(tmp_path / "one")
    assert (one.processes, len(one.steps)) == (1, 20)
    found = compare(one, read_trace(tmp_path / "sum"))
    assert found.causes[0].code == "sum-instead-of-mean"
    found = compare(one, read_trace(tmp_path / "workers"))
    assert found.agree, found.differences[0]
    assert found.losses[0] == pytest.approx(found.losses[0][::-1], rel=1e-5)


def test_steps_by_keywords_are_recorded_and_the_choice_of_the_program_stays(
    tmp_path: Path,
) -> None:
    """Arguments by keyword of `apply` and of clipping; functions run eagerly only where a program asks."""
    script = tmp_path / "keywords.py"
    script.write_text(KEYWORDS)
    for choice in ("True", "False"):
        command = [sys.executable, "-m", "isotrain", "trace", "--output", choice, "--steps", "2"]
        made = subprocess.run(
            [*command, "--", sys.executable, script.name, choice],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        assert "not recorded" not in made.stderr
        assert f"functions run eagerly: {choice}" in made.stdout
        steps = read_trace(tmp_path / choice).steps
        assert len(steps) == 2
        clips = [(event["norm"], event["limit"]) for event in steps[0].first.of_kind("clip")]
        assert clips == [(pytest.approx(5.0), 1.0), (2.0, 1.0)]


@pytest.mark.exhaustive
def test_steps_are_recorded_in_graphs_as_they_are_eagerly(tmp_path: Path) -> None:
    """Functions that are traced once to be recorded and once to go on, which XLA then compiles."""
    script = tmp_path / "graphs.py"
    script.write_text(GRAPHS)
    traces = []
    for mode in ("eagerly", "graphs"):
        command = [sys.executable, "-m", "isotrain", "trace", "--output", mode, "--steps", "4"]
        made = subprocess.run(
            [*command, "--", sys.executable, script.name, mode],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr
        assert "not recorded" not in made.stderr
        counts = re.findall(r"\d+", made.stdout.partition("calls:")[2])
        assert len(counts) == 6
        assert all(int(n) == 10 if mode == "eagerly" else int(n) <= 3 for n in counts), counts
        traces.append(read_trace(tmp_path / mode))
    eager, graph = traces
    assert [step.index for step in graph.steps].count(3) == 6
    for one, other in ((eager, graph), (graph, eager)):
        found = compare(one, other)
        assert found.agree, found.differences[0]
        assert found.steps == 24
    for one, other in zip(eager.steps, graph.steps, strict=True):
        kinds = [[event["event"] for event in step.first.events] for step in (one, other)]
        assert kinds[0] == kinds[1]
        assert one.rows() == other.rows()
        states = [[e["random"] for e in step.first.passes()] for step in (one, other)]
        assert states[0] == states[1]
        assert bool(other.first.initial) == (other.index == 0)


def test_graphs_that_a_program_makes_itself_have_no_hooks(tmp_path: Path) -> None:
    """A process that is not traced loads a SavedModel; calls in `tf.data` are no forward passes."""
    (tmp_path / "saves.py").write_text(SAVED)
    trace = [sys.executable, "-m", "isotrain", "trace", "--output", "trace", "--"]
    load = "import tensorflow as tf; saved = tf.saved_model.load('saved'); "
    load += "print(saved.serve(tf.ones((2, 4))).shape)"
    for command in ([*trace, sys.executable, "saves.py"], [sys.executable, "-c", load]):
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    assert "(2, 1)" in made.stdout
    steps = read_trace(tmp_path / "trace").steps
    assert [len(list(step.first.passes())) for step in steps] == [1, 1, 1]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_an_exchange_of_horovod_in_16_bits_is_no_fault_and_none_is_one(tmp_path: Path) -> None:
    """Horovod's `DistributedOptimizer` overrides methods that Keras 3 does not call."""
    script = tmp_path / "horovod_tape.py"
    script.write_text(HOROVOD)
    for name in ("none", "fp16", "optimizer"):
        command = [sys.executable, "-m", "isotrain", "trace", "--output", name, "--"]
        start = [Path(sys.executable).with_name("horovodrun"), "-np", "2", sys.executable]
        made = subprocess.run(
            [*command, *start, script.name, name], cwd=tmp_path, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
    none, half = read_trace(tmp_path / "none"), read_trace(tmp_path / "fp16")
    assert [trace.steps[0].first.compressed for trace in (none, half)] == [False, True]
    for reference, other in itertools.permutations((none, half)):
        assert compare(reference, other).agree
    found = compare(none, read_trace(tmp_path / "optimizer"))
    assert found.causes[0].code == "not-exchanged"
