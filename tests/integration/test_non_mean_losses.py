"""A loss that is no mean over samples, or a transform that mixes them, is found before the first step.

Wherever a batch is divided among replicas or micro-batches.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isotrain
from isotrain.core.data.loader import Loader
from isotrain.core.data.sources import as_source
from isotrain.core.errors import RunFailedError, SpecError
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.reference.layers import Array, Dense
from isotrain.testing.reference.losses_and_metrics import mean_squared_error
from isotrain.testing.reference.network import Network

BATCH = 12
RNG = np.random.default_rng(3)
DATA = RNG.normal(size=(30, 4)).astype("float32"), RNG.normal(size=(30, 3)).astype("float32")
SPEC: dict[str, Any] = {
    "data": DATA,
    "optimizer": {"name": "sgd", "lr": 0.25},
    "global_batch_size": BATCH,
    "steps": 3,
    "threads": 1,
}


def network() -> Network:
    return Network([Dense(4, 5, name="hidden"), Dense(5, 3, name="last")])


def torch_net() -> Any:
    """Normalisation and dropout, which in evaluation mode are the same for every part of a batch."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))


def keras_net() -> Any:
    import keras

    normal, drop = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
    layers = [keras.Input((4,)), keras.layers.Dense(5), normal, drop, keras.layers.Dense(3)]
    return keras.Sequential(layers)


def errors(model: Any, batch: Any, noise: float = 0.0) -> Any:
    """One number per sample: the squared errors, with noise in every call."""
    inputs, targets = batch
    predictions = model(inputs)
    if "torch" in type(predictions).__module__:
        import torch

        predictions = predictions + noise * torch.randn(predictions.shape)
        return ((predictions - targets) ** 2).mean(1)
    import tensorflow as tf

    predictions = predictions + noise * tf.random.normal(tf.shape(predictions))
    return tf.reduce_mean((predictions - targets) ** 2, 1)


def by_global_batch(model: Any, batch: Any, noise: float = 0.0) -> Any:
    return sum_of(errors(model, batch, noise)) / BATCH


def summed(model: Any, batch: Any) -> Any:
    return sum_of(errors(model, batch))


def mean_of_them(model: Any, batch: Any) -> Any:
    found = errors(model, batch)
    return sum_of(found) / found.shape[0]


def sum_of(values: Any) -> Any:
    if "torch" in type(values).__module__:
        return values.sum()
    import tensorflow as tf

    return tf.reduce_sum(values)


def in_batch_negatives(model: Any, batch: Any) -> Any:
    inputs, targets = batch
    if "torch" in type(inputs).__module__:
        import torch

        scores = model(inputs) @ targets.T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    import tensorflow as tf

    scores = tf.matmul(model(inputs), targets, transpose_b=True)
    places = tf.range(tf.shape(scores)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=places, logits=scores)


def of_a_whole_share(model: Any, batch: Any) -> Any:
    """It takes no parts of a share."""
    assert len(batch[0]) == BATCH // 2
    return errors(model, batch)


noisy = functools.partial(errors, noise=0.3)
noisy_by_global_batch = functools.partial(by_global_batch, noise=0.3)
OBJECTIVES = {
    each.__name__: each
    for each in (errors, mean_of_them, by_global_batch, summed, in_batch_negatives)
} | {"noisy": noisy, "noisy_by_global_batch": noisy_by_global_batch}
MEANS = {"errors", "mean_of_them", "noisy", "silenced", "one row"}


def specs() -> dict[str, Any]:
    base = {**SPEC, "model": {"torch": torch_net, "tensorflow": keras_net}}
    found = {name: {**base, "objective": objective} for name, objective in OBJECTIVES.items()}
    found["silenced"] = {**found["by_global_batch"], "ignore": ["ISO3"]}
    one_row = {"global_batch_size": 2, "model": {"torch": linear, "tensorflow": keras_net}}
    found["one row"] = {**found["errors"], **one_row}
    found["one row by global batch"] = {**found["by_global_batch"], **one_row}
    found["named sum"] = {**base, "loss": {"name": "mean_squared_error", "reduction": "sum"}}
    return found


def refusal(session: isotrain.Session, name: str) -> str:
    try:
        next(session.batches())
    except SpecError as error:
        return str(error)
    return ""


FEW = ("errors", "noisy", "by_global_batch", "named sum")
"""Losses that are tried on backends that compute a loss as another one of their framework does.

What is theirs is how replicas add up losses: a mean, one with noise, a sum by hand and one of Keras.
"""


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        pytest.param("torch-ddp", None, marks=pytest.mark.slow, id="torch-ddp"),
        pytest.param("tf-mirrored", None, marks=pytest.mark.slow, id="tf-mirrored"),
        *(
            pytest.param(name, FEW, marks=pytest.mark.slow, id=name)
            for name in ("tf-multiworker", "horovod-torch", "horovod-tf")
        ),
    ],
)
def test_only_losses_that_are_no_sample_mean_are_refused(
    backend: str, names: tuple[str, ...] | None
) -> None:
    tried = {name: spec for name, spec in specs().items() if name in (names or specs())}
    for found in launched_in_turn(tried, refusal, backend, 2):
        assert {name for name, text in found.items() if not text} == MEANS.intersection(tried)
        assert "`ignore: [ISO301]`" in found["by_global_batch"]


def gathered(model: Any, batch: Any) -> Any:
    """In-batch negatives of all replicas, as people write them who know of replicas."""
    import torch
    import torch.distributed as dist
    from torch.distributed.nn.functional import all_gather

    inputs, targets = batch
    outputs = model(inputs)
    if dist.is_initialized():
        outputs, targets = torch.cat(all_gather(outputs)), torch.cat(all_gather(targets))
    return torch.nn.functional.cross_entropy(outputs @ targets.T, torch.arange(len(outputs)))


def in_training_mode(model: Any, batch: Any) -> Any:
    """Squared errors of the model in training mode, whatever the step does."""
    if hasattr(model, "path"):
        return ((model(batch[0], training=True) - batch[1]) ** 2)[:, 0]
    model.train()
    return ((model(batch[0]) - batch[1]) ** 2).mean(1)


def keras_normalized() -> Any:
    import keras

    normal = keras.layers.BatchNormalization(name="normal")
    return keras.Sequential([keras.Input((4,)), normal, keras.layers.Dense(3)])


def torch_normalized() -> Any:
    from torch import nn

    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "model", "layer"),
    [
        ("tf-mirrored", keras_normalized, "normal (BatchNormalization)"),
        ("torch-ddp", keras_normalized, "normal (BatchNormalization)"),
        ("torch-ddp", {"torch": torch_normalized}, "0 (BatchNorm1d)"),
    ],
)
def test_batch_normalization_in_training_mode_is_named(
    tmp_path: Path, backend: str, model: Any, layer: str
) -> None:
    told: list[Any] = []
    isotrain.run(
        {**SPEC, "model": model, "objective": in_training_mode},
        backend=backend,
        replicas=2,
        output=tmp_path,
        on_event=told.append,
    )
    texts = [event["text"] for event in told if event["event"] == "warning"]
    assert any(f"{layer} normalizes by the statistics of each slice" in text for text in texts)


def linear() -> Any:
    import torch

    torch.manual_seed(1)
    return torch.nn.Linear(4, 3)


@pytest.mark.slow
def test_a_loss_that_gathers_itself_runs_once_declared(tmp_path: Path) -> None:
    spec = {**SPEC, "model": {"torch": linear}, "objective": gathered, "ignore": ["ISO301"]}
    losses = [
        isotrain.run(spec, backend="torch-ddp", replicas=n, output=tmp_path / str(n))
        for n in (1, 2)
    ]
    one, two = (result.history.loss for result in losses)
    assert np.allclose(one, two, rtol=1e-5)


def test_a_note_says_that_a_loss_cannot_be_tried(tmp_path: Path) -> None:
    spec = {**SPEC, "model": {"torch": linear}, "objective": of_a_whole_share, "steps": 2}
    told: list[Any] = []
    isotrain.run(spec, backend="torch-ddp", replicas=2, output=tmp_path, on_event=told.append)
    (warning,) = (event["text"] for event in told if event["event"] == "warning")
    assert "cannot be evaluated (AssertionError" in warning
    assert "`ignore: [ISO301]`" in warning


def own(targets: Array, predictions: Array) -> tuple[Array, Array]:
    return mean_squared_error(targets, predictions)


def own_by_global_batch(targets: Array, predictions: Array) -> tuple[Array, Array]:
    losses, slopes = mean_squared_error(targets, predictions)
    return losses * len(losses) / BATCH, slopes * len(losses) / BATCH


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("divided", [{"replicas": 2}, {"gradient_accumulation_steps": 2}])
def test_a_non_mean_loss_is_refused_wherever_a_batch_is_divided(
    tmp_path: Path, divided: dict[str, int]
) -> None:
    replicas, fields = divided.pop("replicas", 1), {**SPEC, **divided, "model": network}
    spec = {**fields, "loss": own_by_global_batch}
    with pytest.raises(RunFailedError, match="not a mean over samples: the loss of a batch is"):
        isotrain.run(spec, backend="reference", replicas=replicas, output=tmp_path)
    with pytest.raises(SpecError, match="not a mean over samples"):
        isotrain.measured_plan(spec, backend="reference", replicas=replicas)


@pytest.mark.usefixtures("reference")
def test_trying_a_loss_leaves_no_state() -> None:
    ends = []
    for ignore in ((), ("ISO301",)):
        spec = {
            **SPEC,
            "model": network,
            "loss": own,
            "gradient_accumulation_steps": 2,
            "ignore": ignore,
        }
        with isotrain.open_session(spec, backend="reference") as session:
            losses = [float(session.step(batch)) for batch in session.batches()]
            ends.append((losses, session.metrics(), session.evaluate(DATA)))
    assert ends[0] == ends[1]


@pytest.mark.usefixtures("reference")
def test_check_reports_it_for_several_replicas() -> None:
    spec = {**SPEC, "model": network, "loss": own_by_global_batch, "ignore": ["ISO2", "ISO4"]}
    (found,) = isotrain.check(spec, backends="reference", replicas=[1, 2])
    assert (found.code, found.targets) == ("ISO301", ("reference@2",))
    assert found.detail.startswith("the loss of a batch is")
    assert not list(isotrain.check({**spec, "loss": own}, backends="reference", replicas=[1, 2]))


def mixup(inputs: Array, targets: Array, random: Any) -> tuple[Array, Array]:
    share = random.uniform(0.5, 1.0)[:, None]
    return share * inputs + (1 - share) * inputs[::-1], share * targets + (1 - share) * targets[
        ::-1
    ]


def centred(inputs: Array, targets: Array, random: Any) -> tuple[Array, Array]:
    inputs -= inputs.mean(0)
    return inputs, targets


def scaled(inputs: Array, targets: Array, random: Any) -> tuple[Array, Array]:
    inputs *= random.uniform(0.5, 2.0, (4,))
    return inputs + random.normal(shape=(4,)), targets


def drawing(inputs: Array, targets: Array, random: Any) -> tuple[Array, Array]:
    """By the generator that all code shares: it gives no sample twice."""
    return inputs + np.random.normal(size=inputs.shape), targets


def batches() -> Any:
    yield DATA[0][:16], DATA[1][:16]
    yield DATA[0][16:], DATA[1][16:]


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("data", [DATA, batches], ids=["arrays", "stream"])
@pytest.mark.parametrize("transform", [mixup, centred])
def test_a_transform_that_mixes_samples_is_refused(
    tmp_path: Path, transform: Any, data: Any
) -> None:
    spec = {**SPEC, "model": network, "loss": own, "data": data, "transform": transform}
    with pytest.raises(
        RunFailedError, match=r"transform: it mixes samples: .* 6 at once than for 2 and 4"
    ):
        isotrain.run(spec, backend="reference", replicas=2, output=tmp_path / "refused")
    silenced = {**spec, "ignore": ["ISO218"]}
    isotrain.run(silenced, backend="reference", replicas=2, output=tmp_path / "silenced")
    isotrain.run(spec, backend="reference", output=tmp_path / "alone")


def after_looking(session: isotrain.Session, name: str) -> list[Any]:
    """Codes that were looked for, and what is said where the steps would begin; rank 0 alone looks ahead."""
    if session.is_main and name != "transform":  # which no batch comes out of
        session.step_notes()
    session.barrier()
    codes = sorted(session.refusals())
    try:
        next(session.batches())
    except SpecError as error:
        return [codes, str(error).partition(":")[0]]
    return [codes, ""]


@pytest.mark.usefixtures("reference")
def test_looking_ahead_needs_no_other_rank_and_changes_no_refusal() -> None:
    fields = {**SPEC, "model": network, "loss": own}
    cases = {
        "sound": fields,
        "loss": {**fields, "loss": own_by_global_batch},
        "transform": {**fields, "transform": mixup},
    }
    for found in launched_in_turn(cases, after_looking, "reference", 2):
        assert found == {
            "sound": [[], ""],
            "loss": [["ISO301"], "loss"],
            "transform": [["ISO218"], "transform"],
        }


def flipped(inputs: Any, targets: Any, random: Any) -> tuple[Any, Any]:
    """By what tensors of torch have and arrays have not; each sample on its own."""
    return inputs.flip(1).requires_grad_(), targets


def rolled(inputs: Any, targets: Any, random: Any) -> tuple[Any, Any]:
    return inputs.roll(1, 0), targets


class Tensors:
    """Data that give tensors."""

    def __len__(self) -> int:
        return len(DATA[0])

    def gather(self, indices: Array) -> Any:
        import torch

        return tuple(torch.from_numpy(array[indices]) for array in DATA)


@pytest.mark.slow
def test_transforms_of_tensors_are_tried_with_tensors() -> None:
    assert len(list(of_tensors(flipped))) == 3
    with pytest.raises(SpecError, match=r"transform: it mixes samples: .* samples for 6 at once"):
        next(iter(of_tensors(rolled)))


def of_tensors(transform: Any) -> Loader:
    return loader_of(Tensors(), transform, tries=True, epochs=1)


def loader_of(source: Any, transform: Any, *, tries: bool, epochs: int) -> Loader:
    """The loader of the second of two replicas."""
    return Loader(
        source,
        global_batch_size=BATCH,
        replicas=2,
        local_replicas=[1],
        seed=0,
        drop_remainder=False,
        transform=transform,
        tries_transform=tries,
        epochs=epochs,
    )


@pytest.mark.parametrize("transform", [scaled, drawing])
def test_a_transform_of_single_samples_is_accepted(transform: Any) -> None:
    found = []
    for tries in (True, False):
        np.random.seed(5)
        loader = loader_of(as_source(DATA), transform, tries=tries, epochs=2)
        found.append([batch.slices[0][0].inputs for batch in loader])
    assert all(map(np.array_equal, *found))


@pytest.mark.usefixtures("reference")
def test_check_and_plan_report_mixing_transforms() -> None:
    fields = {**SPEC, "model": network, "loss": "mean_squared_error", "ignore": ["ISO211", "ISO4"]}
    spec = {**fields, "transform": mixup}
    (found,) = isotrain.check(spec, backends="reference", replicas=[1, 2])
    assert (found.code, found.targets) == ("ISO218", ("reference@2",))
    assert not list(isotrain.check({**spec, "transform": scaled}, backends="reference", replicas=2))
    with pytest.raises(SpecError, match="transform: it mixes samples"):
        isotrain.measured_plan(spec, backend="reference", replicas=2)
    assert isotrain.measured_plan(spec, backend="reference").samples == 30
