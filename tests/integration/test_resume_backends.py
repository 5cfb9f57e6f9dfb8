"""Runs on real backends that are killed and go on, there or elsewhere."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration import killed_in_turn, pair_runs
from integration.killing import Killer
from integration.pair_runs import EXACT

import isotrain
from isotrain.core.launching.returned import load_value
from isotrain.core.running.result import read_history
from isotrain.testing.bench import assert_same
from isotrain.testing.series import PATIENT

pytestmark = pytest.mark.slow

ALONE = [
    *(("tf-mirrored", "data-parallel"), ("horovod-torch", "data-parallel")),
    *(("horovod-tf", "data-parallel"), ("torch-ddp", "parameter-server")),
]
"""Backends of which only the plain strategy is tried, and one with processes that only it has."""


def data() -> isotrain.DataSet:
    """Four global batches, and one to evaluate on; all of one size, for which frameworks trace once."""
    inputs = np.random.default_rng(2).standard_normal((28, 4))
    labels = np.arange(28) % 3
    return isotrain.DataSet((inputs, labels), (inputs[:7], labels[:7]))


def model() -> Any:
    import keras
    from keras import layers

    hidden = layers.Dense(8, activation="tanh", name="hidden")
    return keras.Sequential([keras.Input((4,)), hidden, layers.Dense(3, name="head")])


def moody() -> Any:
    """A model with state besides its weights, and random numbers; both are a replica's own."""
    import keras
    from keras import layers

    parts = [layers.Dense(8, name="hidden"), layers.BatchNormalization(), layers.Dropout(0.25)]
    return keras.Sequential([keras.Input((4,)), *parts, layers.Dense(3, name="head")])


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": model,
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["accuracy"],
        "optimizer": {"name": "adam", "lr": 0.0625, **EXACT},
        "global_batch": 7,
        "steps": 9,
        "threads": 1,
        "checkpoint": {"every_steps": 2},
    }
    return fields | changes


def run(folder: Path, **options: Any) -> isotrain.RunResult:
    changes = options.pop("changes", {})
    return isotrain.run(
        spec(**changes), run_directory=folder, on_event=lambda event: None, **options
    )


@pytest.mark.parametrize(("backend", "strategy"), ALONE)
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, backend: str, strategy: str) -> None:
    changes: dict[str, Any] = {"strategy": strategy}
    if strategy == "data-parallel":  # what workers of a server draw is their own
        changes["model"] = moody
    whole = run(tmp_path / "whole", backend=backend, replicas=2, changes=changes)
    changes["transform"] = Killer.at([("batch", 7)], tmp_path / "kills")
    found = run(tmp_path / "killed", backend=backend, replicas=2, changes=changes, max_restarts=1)
    assert len(found.restarts) == 1
    assert found.history == whole.history
    assert found.metrics == whole.metrics
    assert_same(dict(found.weights), dict(whole.weights), "weights")


STRATEGIES: dict[str, dict[str, Any]] = {
    "data-parallel": {},
    "local-sgd": {"every": 4, "start": 1, "average_momenta": True},
    "gossip": {},
    "compressed": {"method": "topk", "ratio": 0.25},
    "hierarchical": {},
    "elastic-averaging": {"every": 3},
    "sharded": {"stage": 2},
}


def of_strategies(**others: dict[str, Any]) -> dict[str, Any]:
    """The specs; the name of another begins with its strategy's."""
    return {
        name: spec(
            model=moody,
            strategy={"name": name.partition("_")[0], "options": options},
        )
        for name, options in (STRATEGIES | others).items()
    }


EVERYWHERE = {
    "torch-ddp": {
        "compressed_natively": {"method": "powersgd", "start": 2},
        "compressed_powersgd": {"method": "powersgd", "start": 2, "native": False},
    },
    "tf-multiworker": {},
}


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_killed_runs_of_every_strategy_end_as_those_that_were_not(
    tmp_path: Path, backend: str
) -> None:
    """One launch, whose processes start again after each kill."""
    specs = of_strategies(**EVERYWHERE[backend])
    killed_in_turn.killers(specs, tmp_path)
    given = {**spec(model=moody, checkpoint=None), "timeouts": PATIENT}
    events: list[Any] = []
    isotrain.launch(
        functools.partial(killed_in_turn.trained, specs=specs, folder=tmp_path),
        given,
        backend=backend,
        replicas=2,
        run_directory=tmp_path / "run",
        max_restarts=len(specs),
        on_event=events.append,
    )
    assert sum(event["event"] == "restarted" for event in events) == len(specs)
    told = [killed_in_turn.difference(tmp_path, name, rank) for name in specs for rank in range(2)]
    assert not any(told), "\n".join(told)


def begun(session: isotrain.Session) -> None:
    """Stops in the middle of the second epoch."""
    steps(session, 5)


def finished(session: isotrain.Session) -> Any:
    return steps(session, 1000)


def steps(session: isotrain.Session, most: int) -> Any:
    for batch in itertools.islice(session.batches(), most):
        session.step(batch)
        if batch.is_last_of_epoch:
            session.end_epoch(batch.epoch, session.metrics())
    session.save()
    return session.read_state() if session.is_main else None


def test_the_history_of_a_run_that_changes_its_framework_is_of_one_piece(tmp_path: Path) -> None:
    options = {"resume": "auto", "on_event": lambda event: None}
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    given = spec(precision="float64")
    isotrain.launch(finished, given, backend="torch-ddp", run_directory=whole, **options)
    isotrain.launch(begun, given, backend="torch-ddp", replicas=2, run_directory=parted, **options)
    isotrain.launch(
        finished, given, backend="tf-mirrored", replicas=3, run_directory=parted, **options
    )
    expected, history = read_history(whole), read_history(parted)
    assert history.loss == pytest.approx(expected.loss, rel=0, abs=1e-12)
    assert history.epochs == [pytest.approx(epoch, abs=1e-12) for epoch in expected.epochs]


def with_jax(part: str, backend: str, folder: Path) -> None:
    """Runs a part on the example of a backend, which only a process of its own may import."""
    jax = Path(sys.prefix) / "jax"
    assert jax.is_dir(), f"{jax} is missing: `make environment` installs JAX there"
    example = Path(__file__).resolve().parents[2] / "examples/plugin_backend_jax"
    path = os.pathsep.join([str(jax), str(example), os.environ["PYTHONPATH"]])
    variables = {"PYTHONPATH": path, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    program = f"""
from pathlib import Path
from integration import killed_in_turn, pair_runs
pair_runs.run({part!r}, {backend!r}, Path({str(folder)!r}), plugins=["isotrain_jax"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def run_part(part: str, backend: str, folder: Path) -> dict[str, Any]:
    how = with_jax if backend == "jax-mesh" else pair_runs.run
    how(part, backend, folder)
    return load_value(folder, f"{backend}-{part}")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def firsts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run on every backend, which is saved on its way: the folder, and what each found."""
    folder = tmp_path_factory.mktemp("pairs")
    return folder, {name: run_part("first", name, folder) for name in pair_runs.BACKENDS}


BOUNDS = {"loss scale": 1e-3}
"""Half precision is rounded at other places in each framework; all else is float64."""


@pytest.mark.parametrize("backend", pair_runs.BACKENDS)
def test_every_backend_goes_on_from_every_other(
    firsts: tuple[Path, dict[str, Any]], backend: str
) -> None:
    """Another number of replicas, and each optimizer: as the other would have gone on itself."""
    folder, others = firsts
    rest = run_part("rest", backend, folder)
    for other, case in itertools.product(others.keys() - {backend}, pair_runs.CASES):
        expected, found = others[other][case], rest[case][other]
        assert found["carried"], (other, case)
        assert all(found["carried"]), (other, case)
        near = {"rel": 0, "abs": BOUNDS.get(case, 1e-12)}
        assert found["losses"] == pytest.approx(expected["losses"], **near), (other, case)
        assert found["metrics"] == pytest.approx(expected["metrics"], **near), (other, case)
        for name, value in expected["weights"].items():
            assert found["weights"][name] == pytest.approx(value, **near), (other, case, name)
