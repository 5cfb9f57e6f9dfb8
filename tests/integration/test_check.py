"""The check on real models and data, and the truth of what it says about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.analysis.check.rule import Severity
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.reference.layers import BatchNormalization, Dense, Dropout
from isotrain.testing.reference.network import Network

pytestmark = pytest.mark.usefixtures("reference")

RNG = np.random.default_rng(0)
SAMPLES = isotrain.DataSet((RNG.normal(size=(30, 4)), RNG.normal(size=(30, 1))))
SPEC: dict[str, Any] = {
    "data": SAMPLES,
    "loss": "mean_squared_error",
    "optimizer": {"name": "sgd", "lr": 0.125},
    "global_batch_size": 12,
    "steps": 3,
    "precision": "float64",
    "threads": 1,
    "evaluation": {"every_epochs": 0},
    "ignore": ["ISO4"],
}


def portable(rate: float = 0.0, frozen: bool = False, dtype: Any = None) -> Any:
    import keras

    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(5, dtype=dtype, name="narrow")(inputs)
    normal = keras.layers.BatchNormalization(name="normal")
    normal.trainable = not frozen
    inner = keras.Sequential([keras.layers.Dropout(rate, name="drop")], name="inner")
    steps = keras.layers.Reshape((5, 1))(inner(normal(hidden)))
    steps = keras.layers.LSTM(2, name="memory")(steps)
    return keras.Model(inputs, keras.layers.Dense(1)(steps))


def synchronised() -> Any:
    import keras

    inputs = keras.Input((4,))
    normal = keras.layers.BatchNormalization(synchronized=True, name="normal")
    return keras.Model(inputs, keras.layers.Dense(1)(normal(keras.layers.Dense(5)(inputs))))


def torch_net() -> Any:
    from torch import nn

    parts = [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0))]
    return nn.Sequential(*parts, nn.Linear(5, 1))


def tf_net() -> Any:
    import keras
    import tensorflow as tf

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(tf.ones((4, 1)))
            self.parts = [keras.layers.Dropout(0.5, name="drop")]

        def __call__(self, inputs: Any) -> Any:
            return self.parts[0](tf.cast(inputs, tf.float32) @ self.weight)

    return Net()


def network() -> Network:
    return Network([Dense(4, 5, name="hidden"), Dense(5, 1, name="last")])


def network_of_all_kinds() -> Network:
    normal = BatchNormalization(5, name="normal")
    return Network([Dense(4, 5, name="hidden"), normal, Dropout(0.5), Dense(5, 1, name="last")])


def no_net() -> Any:
    raise ValueError("no such layer")


def layers(result: isotrain.CheckResult) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Layers and targets of findings about layers, by code."""
    return {found.code: (found.layers, found.targets) for found in result if found.layers}


@pytest.mark.slow
def test_layers_of_a_portable_model() -> None:
    spec = {**SPEC, "model": portable, "model_args": {"rate": 0.5, "dtype": "float32"}}
    result = isotrain.check(spec, backends=["torch-ddp", "tf-mirrored"], replicas=[1, 2])
    assert result.targets == ("torch-ddp@1", "torch-ddp@2", "tf-mirrored@1", "tf-mirrored@2")
    several = ("torch-ddp@2", "tf-mirrored@2")
    assert layers(result) == {
        "ISO101": (("normal (BatchNormalization)",), several),
        "ISO102": (("drop (Dropout)",), several),
        "ISO103": (("drop (Dropout)",), result.targets),
        "ISO105": (("narrow (Dense)",), result.targets),
    }


@pytest.mark.slow
def test_a_model_without_such_layers_has_no_findings() -> None:
    spec = {**SPEC, "model": portable, "model_args": {"frozen": True}}
    assert not list(isotrain.check(spec, backends="torch-ddp", replicas=2))


@pytest.mark.slow
def test_parts_of_native_models() -> None:
    spec = {**SPEC, "model": {"torch": torch_net, "tensorflow": tf_net}}
    result = isotrain.check(spec, backends=["torch-ddp", "tf-mirrored"], replicas=2)
    torch, tensorflow = ("torch-ddp@2",), ("tf-mirrored@2",)
    pairs = {(found.code, found.layers, found.targets) for found in result if found.layers}
    assert pairs == {
        ("ISO101", ("1 (BatchNorm1d)",), torch),
        ("ISO102", ("2.0 (Dropout)",), torch),
        ("ISO102", ("drop (Dropout)",), tensorflow),
        ("ISO103", ("2.0 (Dropout)",), torch),
        ("ISO103", ("drop (Dropout)",), tensorflow),
        ("ISO105", ("model (Net)",), tensorflow),
        ("ISO107", ("model (Net)",), tensorflow),
    }
    assert "ISO106" in {found.code for found in result}


def test_layers_of_a_network_of_the_reference_backend() -> None:
    result = isotrain.check(
        {**SPEC, "model": network_of_all_kinds}, backends="reference", replicas=2
    )
    target = ("reference@2",)
    assert layers(result) == {
        "ISO101": (("normal (BatchNormalization)",), target),
        "ISO102": (("dropout (Dropout)",), target),
    }


def test_a_model_that_cannot_be_built_is_a_finding() -> None:
    spec = {**SPEC, "model": no_net, "shuffle": False}
    result = isotrain.check(spec, backends="reference", replicas=[1, 2])
    assert [found.code for found in result] == ["ISO502", "ISO214"]
    assert "ValueError: no such layer" in result.with_severity(Severity.ERROR)[0].detail


def with_own_training() -> Any:
    import keras

    class Own(keras.Model):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

        def train_step(self, data: Any) -> Any:
            raise AssertionError("nobody calls it")

    inputs = keras.Input((4,))
    model = Own(inputs, keras.layers.Dense(1, name="used")(inputs))
    model.unused = model.add_weight(shape=(2,), name="unused")
    model.compile(optimizer="sgd", loss="mse")
    return model


def distance(y_true: Any, y_pred: Any) -> Any:
    return (y_true - y_pred) ** 2


@pytest.mark.slow
def test_unused_training_methods_of_a_model_are_findings() -> None:
    spec = {**SPEC, "model": with_own_training, "loss": distance, "global_batch_size": 10}
    result = isotrain.check(spec, backends="torch-ddp", replicas=2)
    own, unused = (found for found in result if found.code in ("ISO109", "ISO110"))
    assert own.detail == "not called: train_step (Own), compute_loss (Own), compile(...) (Own)"
    assert "unused" in unused.detail
    assert "used/kernel" not in unused.detail


@pytest.mark.slow
def test_a_plan_notes_unused_methods_and_the_argument_order_of_a_loss() -> None:
    spec = {**SPEC, "model": with_own_training, "loss": distance}
    model, loss = isotrain.measured_plan(spec, backend="tf-mirrored", replicas=2).notes
    assert "train_step, compute_loss, compile(...) of Own is not called" in model
    assert loss.endswith("test_check:distance' is called with (targets, predictions)")


@pytest.mark.slow
def test_a_weight_without_a_gradient_ends_ddp_at_the_first_step(tmp_path: Path) -> None:
    options = {"torch-ddp": {"find_unused_parameters": True}}
    spec = {**SPEC, "model": with_own_training}
    with pytest.raises(isotrain.RunFailedError, match=r"unused: .*find_unused_parameters: true"):
        run(spec, tmp_path / "missing")
    assert len(run({**spec, "backend_options": options}, tmp_path / "told").history.loss) == 3
    for log in (tmp_path / "told").glob("rank-*.log"):
        assert "FutureWarning" not in log.read_text()


def run(spec: dict[str, Any], folder: Path) -> isotrain.RunResult:
    return isotrain.run(
        spec, backend="torch-ddp", replicas=2, output=folder, on_event=lambda event: None
    )


def wrong_loss(targets: Any, predictions: Any) -> Any:
    return None


def test_a_first_step_that_fails_is_a_finding() -> None:
    spec = {**SPEC, "model": network, "loss": wrong_loss, "global_batch_size": 10}
    (found,) = isotrain.check(spec, backends="reference", replicas=[1, 2])
    assert (found.code, found.targets) == ("ISO504", ("reference@1", "reference@2"))


class Stream:
    """Two global batches an epoch, of a stream that shards itself."""

    def __len__(self) -> int:
        return 2

    def iterate(self, *, epoch: int, seed: int, replica: int, replicas: int) -> Iterator[Any]:
        for _ in range(2):
            yield np.ones((12 // replicas, 4)), np.ones((12 // replicas, 1))


def test_streams_and_dropping_all_samples_are_findings() -> None:
    spec = {**SPEC, "model": network}
    streamed = isotrain.check({**spec, "data": Stream()}, backends="reference", replicas=[1, 2])
    assert [(found.code, found.targets) for found in streamed] == [("ISO210", ("reference@2",))]
    dropped = {**spec, "global_batch_size": 31, "drop_remainder": True}
    (found,) = isotrain.check(dropped, backends="reference")
    assert (found.code, found.detail) == ("ISO213", "30 samples, global batch 31")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tf-mirrored", "horovod-tf"])
def test_synchronised_normalisation_by_backend(backend: str) -> None:
    spec = {**SPEC, "model": synchronised, "global_batch_size": 10}
    losses = [
        isotrain.run(spec, backend=backend, replicas=count, on_event=lambda event: None)
        for count in (1, 2)
    ]
    one, two = (result.history.loss for result in losses)
    found = {finding.code for finding in isotrain.check(spec, backends=backend, replicas=2)}
    assert np.allclose(one, two, rtol=1e-9) == ("ISO104" not in found)
    assert ("ISO104" in found) == (backend == "horovod-tf")


def over_positions() -> Any:
    from torch import nn

    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 1))


def by_a_function() -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Normal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, inputs: Any) -> Any:
            return functional.batch_norm(inputs, None, None, self.scale, training=self.training)

    return nn.Sequential(Normal(), nn.Linear(4, 1))


def portable_normal() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])


def refuses_single_sample(session: isotrain.Session, name: str) -> str | None:
    before, batch = session.read_state(), session.next_batch()
    assert batch is not None
    found = session.group.refuses_single_sample(batch)
    assert all(np.array_equal(before[n], value) for n, value in session.read_state().items())
    return found


MODELS: dict[str, tuple[Any, str | None]] = {
    "flat": ({"torch": torch_net}, "1 (BatchNorm1d)"),
    "function": ({"torch": by_a_function}, "0 (Normal)"),
    "positions": ({"torch": over_positions}, None),
    "portable": (portable_normal, None),
}


def test_models_that_refuse_a_slice_of_one_sample() -> None:
    """Each is tried on one sample, which moves neither statistics nor the state of random layers."""
    specs = {name: {**SPEC, "model": model} for name, (model, _) in MODELS.items()}
    (found,) = launched_in_turn(specs, refuses_single_sample, "torch-ddp", 1)
    assert found == {name: layer for name, (_, layer) in MODELS.items()}


@pytest.mark.slow
def test_a_slice_that_the_model_refuses_is_an_error_before_the_first_step() -> None:
    """Three samples are left for two replicas, in slices of two and one."""
    spec = {**SPEC, "model": {"torch": torch_net}, "global_batch_size": 9}
    words = "the last batch of each epoch has 3 samples over 2 replicas"
    result = isotrain.check({**spec, "steps": 4}, backends="torch-ddp", replicas=[1, 2])
    (hit,) = [each for each in result if each.code in ("ISO216", "ISO217")]
    assert (hit.code, hit.targets) == ("ISO216", ("torch-ddp@2",))
    assert hit.detail == f"1 (BatchNorm1d): {words}"
    for fields in ({"steps": 3}, {"steps": 4, "drop_remainder": True}):
        found = isotrain.check({**spec, **fields}, backends="torch-ddp", replicas=2)
        assert "ISO216" not in {each.code for each in found}
    plan = isotrain.measured_plan({**spec, "steps": 4}, backend="torch-ddp", replicas=2)
    assert any(words in note for note in plan.notes)
    with pytest.raises(
        isotrain.RunFailedError, match=f"before its first step.*[\\s\\S]*{words}"
    ) as told:
        isotrain.run({**spec, "steps": 4}, backend="torch-ddp", replicas=2)
    assert "set drop_remainder: true, or choose another global_batch_size" in str(told.value)


def leaving(after: int) -> Any:
    """A model of which a layer takes part in the first calls only."""
    from torch import nn

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stays, self.leaves, self.calls = nn.Linear(4, 1), nn.Linear(4, 1), 0

        def forward(self, inputs: Any) -> Any:
            self.calls += self.training
            found = self.stays(inputs)
            return found + self.leaves(inputs) if self.calls <= after else found

    return Leaving()


@pytest.mark.parametrize("steps", [3, 5])
def test_a_weight_that_stops_affecting_the_loss_is_named(steps: int) -> None:
    """Torch reports it in the next step, or at the run's end; until then it has averaged no gradient."""
    spec = {**SPEC, "model": {"torch": leaving}, "model_args": {"after": 2}, "steps": steps}
    words = r"leaves\.weight, leaves\.bias: .*find_unused_parameters: true"
    with pytest.raises(isotrain.RunFailedError, match=words):
        isotrain.run(spec, backend="torch-ddp", replicas=2)
    options = {"torch-ddp": {"find_unused_parameters": True}}
    isotrain.run({**spec, "backend_options": options}, backend="torch-ddp", replicas=2)
