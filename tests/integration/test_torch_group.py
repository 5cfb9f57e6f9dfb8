"""What is particular to torch replicas: native optimizers, placeholders, losses of a model's own layers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

import isotrain
from isotrain.testing.consecutive_sessions import next_session

pytestmark = pytest.mark.features
START = [-1.0, -0.5, 0.25, 1.0]


def samples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    return generator.standard_normal((9, 4)), generator.standard_normal((9, 1))


def keras_net(normalised: bool = False, penalised: bool = False) -> Any:
    import keras

    regularizer = keras.regularizers.L2(0.25) if penalised else None
    layers = [keras.layers.Dense(1, kernel_regularizer=regularizer, name="dense")]
    if normalised:
        layers.insert(0, keras.layers.BatchNormalization(name="norm"))
    return keras.Sequential([keras.Input((4,)), *layers])


def torch_net() -> Any:
    """The same linear model with the same initial weights, native."""
    import torch

    linear = torch.nn.Linear(4, 1)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([START]))
        linear.bias.fill_(0.5)
    return linear


LAMB = {"name": "lamb", "lr": 0.125, "beta_1": 0.875, "beta_2": 0.9375, "epsilon": 2.0**-20}
ONE_SAMPLE = {"global_batch_size": 1, "model_args": {"normalised": True}, "shuffle": False}
COMPILED = {"compile": True, "metrics": [], "steps": 4, "drop_remainder": True}
ALONE: dict[str, dict[str, Any]] = {
    "native": {"model": torch_net, "optimizer": LAMB},
    "portable": {"optimizer": LAMB},
    "whole": ONE_SAMPLE,
    "cut": {**ONE_SAMPLE, "gradient_accumulation_steps": 3},
    "penalised": {"model_args": {"penalised": True}},
    "plain": {},
    "native compiled": {"model": torch_net, **COMPILED},
    "native as it is": {"model": torch_net, **COMPILED, "compile": False},
    "portable compiled": COMPILED,
}
"""What one replica trains."""
OVERLAPPED = {
    "model_args": {"normalised": True},
    "drop_remainder": True,
    "backend_options": {"torch-ddp": {"bucket_cap_mb": 1e-6}},
}
"""Every weight has a bucket of its own."""

FLOAT16 = {"precision": "float16", "loss_scale": {"initial": 1024.0, "growth_steps": 2}}


def spec(**fields: Any) -> dict[str, Any]:
    return {
        "model": keras_net,
        "data": samples,
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.0625},
        "precision": "float64",
        "global_batch_size": 4,
        "steps": 6,
        "threads": 1,
        **fields,
    }


def train(session: isotrain.Session) -> dict[str, Any]:
    """Starts from fixed weights where there are some, and returns all states and losses."""
    weights = session.read_state(("trainable",))
    if "dense/kernel" in str(weights):
        kernel = next(name for name in weights if name.endswith("dense/kernel"))
        bias = next(name for name in weights if name.endswith("dense/bias"))
        session.write_state({kernel: np.array([START]).T, bias: np.array([0.5])})
    graphs = compiled_graphs()
    losses = [float(session.step(batch)) for batch in session.batches()]
    return {
        "losses": losses,
        "state": session.read_state(),
        "compiled": compiled_graphs() - graphs,
    }


def course_of_steps(session: isotrain.Session) -> list[str]:
    """Events of each step: Keras calls a layer (k), a bucket is sent (b), the first gradient is ready (g)."""
    import keras
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    noted: list[str] = []
    call = keras.layers.Dense.call

    def called(*given: Any, **options: Any) -> Any:
        noted.append("k")
        return call(*given, **options)

    group: Any = session.group
    group.communicator.module.register_comm_hook(
        None, lambda state, bucket: noted.append("b") or allreduce_hook(state, bucket)
    )
    first = group.model.trainable_variables[0].value
    first.register_post_accumulate_grad_hook(lambda weight: noted.append("g"))
    steps = []
    with mock.patch.object(keras.layers.Dense, "call", called):
        for batch in session.batches():
            session.step(batch)
            steps.append("".join(noted))
            noted.clear()
    return steps


def compiled_graphs() -> int:
    """How many graphs torch's compiler has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def kept_and_computed_gradients(session: isotrain.Session) -> list[list[Any]]:
    """Kept gradients of a step, and the mean of those computed for its batch."""
    batch = next(session.batches())
    group = session.group
    (local_gradients,), _ = group.gradients(batch)
    means = [group.all_reduce([gradient], "mean")[0] for gradient in local_gradients]
    assert group.keep_gradients()
    session.step(batch)
    return [[group.numpy(value) for value in values] for values in (*group.kept_gradients(), means)]


def train_all(session: isotrain.Session) -> dict[str, Any]:
    """Trains what three replicas train; then process 0 alone what one does."""
    found: dict[str, Any] = {"split": train(session)}
    with next_session(session, "overlap", spec(**OVERLAPPED)) as session:
        found["overlap"] = course_of_steps(session)
    with next_session(session, "scaled", spec(**FLOAT16)) as session:
        found["gradients"] = kept_and_computed_gradients(session)
    for name, fields in ALONE.items() if session.is_main else ():
        with isotrain.open_session(spec(**fields), backend="torch-ddp", replicas=1) as alone:
            found[name] = train(alone)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and states of all trainings, from one launch."""
    returned = isotrain.launch(
        train_all,
        spec(model_args={"penalised": True}),
        backend="torch-ddp",
        replicas=3,
        output=tmp_path_factory.mktemp("runs") / "run",
        on_event=lambda event: None,
    )
    return dict(returned[0])


def test_native_lamb_is_that_of_keras(found: dict[str, Any]) -> None:
    native, portable = found["native"], found["portable"]
    assert len(native["losses"]) == 6
    assert len(set(native["losses"])) == 6
    np.testing.assert_allclose(native["losses"], portable["losses"], rtol=1e-9)


def test_a_placeholder_does_not_move_the_statistics(found: dict[str, Any]) -> None:
    """With more micro-batches than samples some are empty; they change nothing."""
    whole, cut = found["whole"]["state"], found["cut"]["state"]
    assert set(whole) == set(cut)
    moving = next(name for name in whole if name.endswith("moving_mean"))
    assert np.abs(whole[moving]).max() > 0
    for name, value in whole.items():
        np.testing.assert_allclose(cut[name], value, rtol=1e-12, atol=1e-15, err_msg=name)


def test_losses_of_the_models_own_layers_count_once_on_any_split(found: dict[str, Any]) -> None:
    penalised, plain = found["penalised"], found["plain"]
    penalty = 0.25 * np.square(START).sum()
    assert np.isclose(penalised["losses"][0], plain["losses"][0] + penalty, rtol=1e-12)
    np.testing.assert_allclose(found["split"]["losses"], penalised["losses"], rtol=1e-12)


def test_gradients_are_reduced_during_a_replayed_backward_pass(found: dict[str, Any]) -> None:
    """Those of the last layer leave before the first layer's are computed, where no Python of Keras runs."""
    first, *_, replayed = found["overlap"]
    assert first == "kgb"  # of DDP's first step: all in one bucket
    assert sorted(replayed) == ["b"] * 4 + ["g"]
    assert replayed.startswith("bb")


def test_kept_gradients_are_divided_by_the_loss_scale(found: dict[str, Any]) -> None:
    for kept, computed in zip(*found["gradients"], strict=True):
        np.testing.assert_allclose(kept, computed, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["native", "portable"])
def test_compiled_models_train_as_others(found: dict[str, Any], kind: str) -> None:
    plain, compiled = found["native as it is"], found[f"{kind} compiled"]
    assert plain["compiled"] == 0 < compiled["compiled"]
    np.testing.assert_allclose(compiled["losses"], plain["losses"], rtol=1e-12)
