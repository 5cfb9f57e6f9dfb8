"""Runs on the backend that is given, in an environment where it is installed; what they find goes to files.

The example packages make their tests here too: all runs are forked from one fork server.

Run as `python -m plugins.example_backend_runs BACKEND FOLDER`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from conformance import check_strategies, spec_variety, strategy_check_context, trained_cases
from helpers.shared_fork_servers import share_fork_servers
from integration import exported_models
from plugins import example_sharded_runs
from plugins.example_plugin_tests import EXAMPLES, said

import isotrain
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.worker.fit import fit
from isotrain.testing import digits, native_equality, reference_model, strategy, strategy_runs
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS, next_session
from isotrain.testing.launching import Run, try_run
from isotrain.testing.scorecard import outcome_of

CASE = trained_cases.FLOAT64
"""A convolutional network and a transformer."""
VARIED = ("adamw", "bfloat16", "float16-clipped")
"""Choices of a spec that the backend's own code has a hand in."""
SLOW = ("slow-momentum", {"every": 3})
"""The other example, and options of it."""
IN_HOSTS = {"name": "sharded", "options": {"hybrid": True, "host_size": 1}}
IN_SHARES = ("sharded", {"stage": 2})
ONE_IMAGE = next(trial for trial in strategy.STRATEGY_RUNS if trial.work is strategy_runs.one_image)
"""Shows whether a replica has what it should have of weights and slots."""
EPOCH = digits.spec(count=2 * digits.GLOBAL_BATCH, epochs=1)
PENALTIES = (0.0, 0.25)
SAMPLES = "samples.npy"
"""To be predicted for by the exported models beside it."""


def threads_of_imports(backend: str) -> int | None:
    """How many threads begin in what the backend's processes are forked from; None: they are not forked.

    It is imported here, where nothing of the backend is yet.
    """
    plan = isotrain.plan(EPOCH, backend=backend, replicas=2)
    if plan.start_method.way != "forked":
        return None
    os.environ.update(plan.environment_variables)
    with contextlib.suppress(ImportError):
        importlib.import_module("pyarrow")  # Keras imports it with pandas; its thread is its own
    before = psutil.Process().num_threads()
    for module in plan.start_method.imports:
        importlib.import_module(module)
    return psutil.Process().num_threads() - before


def model_with_losses_of_its_own(penalty: float) -> Any:
    """A layer, regularised unless the penalty is 0, and one that adds a loss of its input."""
    import keras
    from keras import layers, ops

    class Adding(layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(ops.mean(ops.square(inputs)))
            return inputs

    regularizer = keras.regularizers.L2(penalty) if penalty else None
    hidden = layers.Dense(3, kernel_regularizer=regularizer, use_bias=False, name="hidden")
    return keras.Sequential([keras.Input((4,)), hidden, Adding()])


def own_losses(penalty: float) -> dict[str, Any]:
    """Losses of that model's spec: one global batch of all samples in order."""
    inputs, targets = reference_model.samples()
    return {
        "model": model_with_losses_of_its_own,
        "model_args": {"penalty": penalty},
        "data": isotrain.DataSet((inputs["features"], targets)),
        "loss": "mean_squared_error",
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": reference_model.SAMPLES,
        "shuffle": False,
        "epochs": 1,
        "precision": "float64",
    }


def expected_loss(kernel: np.ndarray, penalty: float) -> float:
    """The loss of its first step in NumPy."""
    inputs, targets = reference_model.samples()
    outputs = inputs["features"] @ kernel
    parts = (np.mean((outputs - targets) ** 2), penalty * np.sum(kernel**2), np.mean(outputs**2))
    return float(sum(parts))


def loss_and_expectation(backend: str, penalty: float) -> tuple[float, float]:
    """The first loss of the model with losses of its own, and what NumPy says."""
    spec = own_losses(penalty)
    with isotrain.open_session(spec, backend=backend, replicas=1) as session:
        (kernel,) = session.read_state(("trainable",)).values()
        (loss,) = [float(session.step(batch)) for batch in session.batches()]
    return loss, expected_loss(kernel, penalty)


def save_varied(backend: str, folder: Path) -> None:
    """Trains a small model with each of these choices, in this process; one file for each."""
    for name in VARIED:
        spec = spec_variety.SPECS[name]
        with isotrain.open_session(spec, backend=backend, replicas=1) as session:
            np.savez(folder / f"{name}.npz", **spec_variety.train(session, name))  # type: ignore[arg-type]


def specs_of_trials(backend: str, replicas: int) -> dict[str, dict[str, Any]]:
    """Specs of the strategy's trials on the backend, by index in the kit."""
    host = plugin_manager()
    adapter, tried = host.backend(backend), host.strategy(*SLOW)
    return {
        str(place): trial.spec(*SLOW, adapter)
        for place, trial in enumerate(strategy.STRATEGY_RUNS)
        if (trial.replicas or 2) == replicas
        and not all(inapplicable(tried) for inapplicable in trial.checks.values())
    }


def tried_alone(backend: str) -> dict[str, list[Any]]:
    """What trials on one replica bring back, made in this process."""
    found = {}
    for place, spec in specs_of_trials(backend, 1).items():
        with isotrain.open_session(spec, backend=backend, replicas=1) as session:
            found[place] = [strategy.STRATEGY_RUNS[int(place)].work(session)]
    return found


def as_if_alone(brought_back: list[Any]) -> Run:
    """A trial's part, as if it had had a run of its own."""
    return Run(brought_back, {}, None, ended=0.0, exit_seconds=0.0, folder=Path())


def outcomes_of_the_strategy(
    backend: str, brought_back: Mapping[str, list[Any]]
) -> dict[str, tuple[str, str | None]]:
    """What the kit says of it: a verdict for each check, and why."""
    host = plugin_manager()
    adapter, tried = host.backend(backend), host.strategy(*SLOW)
    found = [outcome_of(strategy.DECLARATIONS, tried)]
    for place, trial in enumerate(strategy.STRATEGY_RUNS):
        run = functools.partial(as_if_alone, brought_back.get(str(place), []))
        found += strategy.outcomes(trial, tried, adapter, run)
    found.append(strategy.resume_outcome(*SLOW, backend))
    found.append(strategy.elastic_outcome(*SLOW))
    return {outcome.check: (outcome.verdict, outcome.reason) for outcome in found}


def outcomes_of_shares(backend: str, brought_back: list[Any]) -> dict[str, tuple[str, str | None]]:
    """What the kit says of that trial."""
    host = plugin_manager()
    adapter, tried = host.backend(backend), host.strategy(*IN_SHARES)
    run = functools.partial(as_if_alone, brought_back)
    found = strategy.outcomes(ONE_IMAGE, tried, adapter, run)
    return {outcome.check: (outcome.verdict, outcome.reason) for outcome in found}


def in_turn(session: isotrain.Session) -> dict[str, Any]:
    """Everything that needs several replicas, one after the other in the processes of one run.

    Args:
        session: Of the run.

    Returns:
        What the layers of the strategies' model do, and their class; what is wrong with each of isotrain's
        own strategies, by check; what trials of the other example bring back; what the case ends with; loss
        and metrics of one epoch in shares; and what a trial of shares brings back.
    """
    found: dict[str, Any] = {
        "traits": [(each.trait, each.kind) for each in session.group.traits()],
        "strategies": check_strategies.run_checks(session, check_strategies.OF_BACKENDS),
    }
    tried = found["tried"] = {}
    for place, spec in specs_of_trials(session.plan.backend, 2).items():
        with next_session(session, f"trial-{place}", spec) as session:
            tried[place] = strategy.STRATEGY_RUNS[int(place)].work(session)
    with next_session(session, "case", trained_cases.SPECS[CASE]) as session:
        found["case"] = native_equality.train(session)
    with next_session(session, "epoch", {**EPOCH, "strategy": IN_HOSTS}) as session:
        metrics = fit(session)
        found["epoch"] = {"final loss": session.last_loss, **metrics}
    name, options = IN_SHARES
    shares = ONE_IMAGE.spec(name, options, plugin_manager().backend(session.plan.backend))
    with next_session(session, "one image", shares) as session:
        found["one image"] = ONE_IMAGE.work(session)
    return found


def parameter_server_epoch(backend: str, folder: Path) -> dict[str, float]:
    """Loss and metrics of the same epoch by a parameter server."""
    spec = {**EPOCH, "strategy": "parameter-server"}
    found = isotrain.run(spec, backend=backend, replicas=2, output=folder, on_event=lambda _: None)
    return {"final loss": found.last_loss, **found.metrics}


def main() -> None:
    """Makes all of them."""
    share_fork_servers(preloaded=("helpers.infrequent_gc", "helpers.jax_compilation_cache"))
    backend, folder = sys.argv[1], Path(sys.argv[2])
    found: dict[str, Any] = {
        "threads of imports": threads_of_imports(backend),
        "own tests": said(EXAMPLES / "plugin_backend_jax"),
        "tests of the strategy": said(EXAMPLES / "plugin_strategy_slowmo", "-k", "is_momentum"),
    }
    spec = {**strategy_check_context.spec(backend), "timeouts": LONG_TIMEOUTS}
    saved = str(folder / "sharded")
    found["sharded"] = example_sharded_runs.found(backend, saved)
    found["gone on"] = example_sharded_runs.gone_on_by_four(backend, saved)
    run = try_run(in_turn, spec, backend, 2)
    assert run.failure is None, run.failure
    first = run.returned[0]
    found["strategies"] = [each["strategies"] for each in run.returned]
    found["kit of shares"] = outcomes_of_shares(
        backend, [each["one image"] for each in run.returned]
    )
    places = first["tried"]
    brought_back = {place: [each["tried"][place] for each in run.returned] for place in places}
    found["kit of the strategy"] = outcomes_of_the_strategy(
        backend, brought_back | tried_alone(backend)
    )
    found["losses"] = first["case"]["loss"]
    np.savez(folder / "weights.npz", **first["case"]["weights"])
    found["own losses"] = [loss_and_expectation(backend, penalty) for penalty in PENALTIES]
    found["traits"] = first["traits"]
    found["epochs"] = [first["epoch"], parameter_server_epoch(backend, folder / "parameter-server")]
    save_varied(backend, folder)
    samples = np.load(folder / SAMPLES)
    opened = exported_models.by_keras, exported_models.by_keras_weights
    found["opened"] = [by_keras(folder, samples) for by_keras in opened]
    (folder / "found.json").write_text(
        json.dumps(found, default=np.ndarray.tolist), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
