"""Cost of `isotrain trace`: steps of plain torch or Keras that are recorded, between steps that are not.

python -m benchmarks.tracing [STEPS] [torch|tensorflow]

A step of Keras is a function of TensorFlow, which runs as a graph in both cases.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from isotrain.adapters.torch import program_hooks
from isotrain.analysis.program_trace.recorder import Recorder


class Switch(Recorder):
    """A recorder that can be switched off for a step."""

    is_on = True

    def wants(self, optimizer: int) -> bool:
        return self.is_on


def mlp(samples: int = 256) -> tuple[nn.Module, torch.Tensor]:
    """A network of 4 million weights, and a batch."""
    layers = [nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(samples, 1024)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Four blocks of width 256, and a batch of 32 sequences of 64."""
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(64 * 256, 10)), torch.randn(32, 64, 256)


def deep() -> tuple[nn.Module, torch.Tensor]:
    """A hundred layers of width 32, whose 200 weights are small, and a batch of 32."""
    layers = [layer for _ in range(100) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(32, 32)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp, batch of 256": mlp,
    "mlp, batch of 1024": functools.partial(mlp, 1024),
    "transformer": transformer,
    "deep": deep,
}


def measure(name: str, recorder: Switch, steps: int) -> None:
    """Prints the ratio of the fastest steps with and without a record."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    targets = torch.randint(10, (len(inputs),))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def switch(mode: str) -> None:
        recorder.is_on = recorder.is_recording = mode == "recorded"

    show(name, time_in_turn(step, switch, ("not recorded", "recorded"), steps))


def measure_keras(samples: int, recorder: Switch, steps: int) -> None:
    """Prints the same for the network of `mlp` in Keras, whose step is a function of TensorFlow."""
    import keras
    import tensorflow as tf

    layers = [keras.layers.Dense(2048, "relu"), keras.layers.Dense(1024, "relu")]
    model = keras.Sequential([keras.Input((1024,)), *layers, keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    inputs = tf.random.normal((samples, 1024))
    targets = tf.random.uniform((samples,), 0, 10, tf.int32)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def train() -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(inputs, training=True))
        optimizer.apply(tape.gradient(loss, [w.value for w in model.trainable_variables]))

    def step() -> None:
        train()
        optimizer.iterations.numpy()  # waits for the step

    def switch(mode: str) -> None:
        recorder.is_on = recorder.is_recording = mode == "recorded"

    times = time_in_turn(step, switch, ("not recorded", "recorded"), steps)
    show(f"keras, batch of {samples}", times)


def time_in_turn(
    step: Callable[[], None], switch: Callable[[str], None], modes: Sequence[str], steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds by clock and of processors of each step, by mode, after two rounds; modes take turns."""
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    for round_ in range(steps + 2):
        for mode in modes:
            switch(mode)
            wall, processor = time.perf_counter(), time.process_time()
            step()
            spent = time.perf_counter() - wall, time.process_time() - processor
            if round_ >= 2:
                times[mode].append(spent)
    return times


def show(name: str, times: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Prints the fastest step of each mode, and its ratio to that of the first mode.

    Other programs on the machine only add to the time of a step.
    """
    for index, what in enumerate(("wall", "processor time")):
        fastest = {mode: min(each[index] for each in spent) for mode, spent in times.items()}
        first = next(iter(fastest.values()))
        shown = [f"{m} {1e3 * v:8.1f} ms ({v / first:.2f} times)" for m, v in fastest.items()]
        print(f"{name:18} {what:15} {', '.join(shown)}")


def main(steps: int, framework: str) -> None:
    torch.set_num_threads(1)  # several would wait for each other beside other programs
    with tempfile.TemporaryDirectory() as folder:
        recorder = Switch(Path(folder), steps=10**9)
        if framework == "tensorflow":
            import tensorflow as tf

            from isotrain.adapters.tensorflow import program_hooks as keras_hooks

            tf.config.threading.set_intra_op_parallelism_threads(2)
            keras_hooks.install(recorder)
            for samples in (256, 1024):
                measure_keras(samples, recorder, steps)
            return
        program_hooks.install(recorder)
        for name in MODELS:
            measure(name, recorder, steps)


if __name__ == "__main__":
    given = [*sys.argv[1:], *("20", "torch")[len(sys.argv) - 1 :]]
    main(int(given[0]), given[1])
