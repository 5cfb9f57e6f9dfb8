"""Runs on real backends that are killed and go on, there or elsewhere."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import jax_install
from integration import backend_pair_runs, strategy_kills
from integration.backend_pair_runs import EXACT
from integration.random_kills import Killer

import isotrain
from isotrain.core.checkpoints.folder import checkpoint_at
from isotrain.core.launching.run_directory.return_values import load_value
from isotrain.core.results.result import read_history
from isotrain.testing.check_context import assert_same
from isotrain.testing.consecutive_sessions import LONG_TIMEOUTS

pytestmark = pytest.mark.slow


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Four global batches of one size, for which frameworks trace once."""
    return np.random.default_rng(2).standard_normal((28, 8)), np.arange(28) % 3


def data() -> isotrain.DataSet:
    """With a batch to evaluate on."""
    inputs, labels = samples()
    return isotrain.DataSet((inputs, labels), (inputs[:7], labels[:7]))


def model() -> Any:
    import keras
    from keras import layers

    hidden = layers.Dense(8, activation="tanh", name="hidden")
    return keras.Sequential([keras.Input((8,)), hidden, layers.Dense(3, name="head")])


def dropping() -> Any:
    """A model with random numbers."""
    import keras
    from keras import layers

    parts = [layers.Dropout(0.25), layers.Dense(4, name="head")]
    return keras.Sequential([keras.Input((8,)), *parts])


def moody() -> Any:
    """A model with state besides its weights, and random numbers; both are a replica's own."""
    import keras
    from keras import layers

    parts = [layers.BatchNormalization(), layers.Dropout(0.25)]
    return keras.Sequential([keras.Input((8,)), *parts, layers.Dense(4, name="head")])


def spec(**changes: Any) -> dict[str, Any]:
    fields = {
        "model": model,
        "data": data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "metrics": ["accuracy"],
        "optimizer": {"name": "adam", "lr": 0.0625, **EXACT},
        "global_batch_size": 7,
        "steps": 9,
        "threads": 1,
        "checkpoint": {"every_steps": 2},
    }
    return fields | changes


def run(folder: Path, **options: Any) -> isotrain.RunResult:
    changes = options.pop("changes", {})
    return isotrain.run(spec(**changes), output=folder, on_event=lambda event: None, **options)


def test_a_killed_run_ends_as_if_never_killed(tmp_path: Path) -> None:
    """It has captures, dropout that workers draw by replica and step, and processes of its own."""
    changes: dict[str, Any] = {"strategy": "parameter-server", "model": dropping}
    whole = run(tmp_path / "whole", backend="torch-ddp", replicas=2, changes=changes)
    changes["transform"] = Killer.at([("batch", 15)], tmp_path / "kills")  # two a step
    folder = tmp_path / "killed"
    found = run(folder, backend="torch-ddp", replicas=2, changes=changes, max_restarts=1)
    assert [restart["from_step"] > 0 for restart in found.restarts] == [True]
    assert found.history == whole.history
    assert found.metrics == whole.metrics
    assert_same(dict(found.weights), dict(whole.weights), "weights")
    ends = [checkpoint_at(tmp_path / each) for each in ("killed", "whole")]
    for replica in ("replica-0", "replica-1"):  # as often as its worker has met slices in all
        killed, other = (end.read(replica) for end in ends)
        assert len(killed["execution/worker/replays/training"]) == 1
        assert_same(killed, other, replica)


STRATEGIES: dict[str, dict[str, Any]] = {
    "data-parallel": {},
    "local-sgd": {"every": 4, "start": 1, "average_momenta": True},
    "elastic-averaging": {"every": 3},
    "sharded": {"stage": 2},
    "compressed_natively": {"method": "powersgd", "start": 2},
    "compressed_powersgd": {"method": "powersgd", "start": 2, "native": False},
}
"""Each kind of what is kept; the name begins with the strategy's. `test_resume.py` kills all, elsewhere."""
EXCHANGED = ("data-parallel",)
TRIED: dict[str, tuple[str, ...]] = {
    "torch-ddp": tuple(STRATEGIES),
    "tf-multiworker": ("sharded",),
    **dict.fromkeys(("horovod-torch", "horovod-tf"), EXCHANGED),
    "tf-mirrored": ("local-sgd",),
}
"""All where that is quick, weights apart in each layout of processes and in parts in the other framework, and
every other exchange.

What strategies keep of TensorFlow's tensors comes back in `test_exact_resume.py`. All pairs are of the drill,
`benchmarks.kills`.
"""
SEEDS = {backend: seed for seed, backend in enumerate(TRIED)}


RECORDED = ("data-parallel",)
"""To record a model takes longest on torch, and what comes back is the same where it is not."""


def of_strategies(names: Iterable[str]) -> dict[str, Any]:
    return {
        name: spec(
            model=moody,
            data=samples,
            capture=name in RECORDED,
            strategy={
                "name": name.partition("_")[0],
                "options": STRATEGIES[name],
            },
        )
        for name in names
    }


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, marks=[] if backend == "torch-ddp" else pytest.mark.failures)
        for backend in TRIED
    ],
)
def test_killed_runs_of_strategies_end_as_if_never_killed(tmp_path: Path, backend: str) -> None:
    assert_killed_ones_end_alike(of_strategies(TRIED[backend]), tmp_path, backend, 2)


@pytest.mark.parametrize(
    ("backend", "replicas"),
    [("torch-ddp", 2), pytest.param("tf-multiworker", 1, marks=pytest.mark.failures)],
)
def test_a_killed_pipeline_run_ends_as_if_never_killed(
    tmp_path: Path, backend: str, replicas: int
) -> None:
    given = spec(
        model=moody, data=samples, capture=False, strategy="pipeline", gradient_accumulation_steps=2
    )
    assert_killed_ones_end_alike({"pipeline": given}, tmp_path, backend, replicas)


def assert_killed_ones_end_alike(
    specs: Mapping[str, Any], tmp_path: Path, backend: str, replicas: int
) -> None:
    """One launch, whose processes start again after each kill."""
    strategy_kills.killers(specs, tmp_path, SEEDS[backend])
    first = next(iter(specs.values()))
    given = {**first, "checkpoint": None, "timeouts": LONG_TIMEOUTS}
    events: list[Any] = []
    processes = isotrain.launch(
        functools.partial(strategy_kills.trained, specs=specs, folder=tmp_path),
        given,
        backend=backend,
        replicas=replicas,
        output=tmp_path / "run",
        max_restarts=len(specs),
        on_event=events.append,
    )
    assert sum(event["event"] == "restarted" for event in events) == len(specs)
    ranks = range(len(processes))
    told = [strategy_kills.difference(tmp_path, name, rank) for name in specs for rank in ranks]
    assert not any(told), "\n".join(filter(None, told))


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


def test_a_run_that_changes_its_framework_has_one_history(tmp_path: Path) -> None:
    options = {"resume": "auto", "on_event": lambda event: None}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    given = spec(precision="float64", capture=False)
    isotrain.launch(finished, given, backend="torch-ddp", output=whole, **options)
    isotrain.launch(begun, given, backend="torch-ddp", replicas=2, output=resumed, **options)
    isotrain.launch(finished, given, backend="tf-mirrored", replicas=3, output=resumed, **options)
    expected, history = read_history(whole), read_history(resumed)
    assert history.loss == pytest.approx(expected.loss, rel=0, abs=1e-12)
    assert history.epochs == [pytest.approx(epoch, abs=1e-12) for epoch in expected.epochs]


JAX = "jax-mesh"


def with_jax(folder: Path) -> None:
    """Runs the example of a backend, which only a process of its own may import, and takes long to."""
    example = Path(__file__).resolve().parents[2] / "examples/plugin_backend_jax"
    path = os.pathsep.join([str(jax_install.folder()), str(example), os.environ["PYTHONPATH"]])
    variables = {"PYTHONPATH": path, "XLA_FLAGS": " ".join(jax_install.QUICK_TO_COMPILE)}
    program = f"""
from pathlib import Path
from integration import backend_pair_runs
backend_pair_runs.run("both", {JAX!r}, Path({str(folder)!r}), plugins=["isotrain_jax"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@dataclass
class Pairs:
    """A run on every backend, which is saved on its way; and how each went on from every other.

    Attributes:
        found: By part and backend, what was found in each case.
        faults: By backend, why it has not done all of its parts.
    """

    found: dict[str, dict[str, Any]]
    faults: dict[str, str]

    @classmethod
    def of_all(cls, folder: Path) -> Pairs:
        """Runs all of them; one that fails leaves the others alone."""
        pairs = cls({"first": {}, "rest": {}}, {})
        natives = [name for name in backend_pair_runs.BACKENDS if name != JAX]
        for name in natives:
            pairs._run("first", name, folder)
        pairs._run("both", JAX, folder)
        for name in natives:
            pairs._run("rest", name, folder)
        return pairs

    def _run(self, part: str, backend: str, folder: Path) -> None:
        try:
            with_jax(folder) if backend == JAX else backend_pair_runs.run(part, backend, folder)
        except AssertionError as fault:
            self.faults[backend] = str(fault)
            return
        found = load_value(folder, f"{backend}-{part}")
        for each, of_all in self.found.items():
            if part == "both":
                of_all[backend] = {case: own[each] for case, own in found.items()}
            elif part == each:
                of_all[backend] = found


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs.of_all(tmp_path_factory.mktemp("pairs"))


BOUNDS = {"loss scale": 1e-3}
"""Half precision is rounded at other places in each framework; all else is float64."""


@pytest.mark.parametrize("backend", backend_pair_runs.BACKENDS)
def test_every_backend_resumes_from_every_other(pairs: Pairs, backend: str) -> None:
    """It continues as the other backend would have, in some cases with another number of replicas."""
    assert backend not in pairs.faults, pairs.faults[backend]
    others, rest = pairs.found["first"], pairs.found["rest"][backend]
    assert set(backend_pair_runs.BACKENDS) - others.keys() <= pairs.faults.keys()
    for other, case in backend_pair_runs.GOES_ON[backend].items():
        if other not in others:  # it has a fault, which its own test tells
            continue
        expected, found = others[other][case], rest[case][other]
        assert found["carried"], (other, case)
        assert all(found["carried"]), (other, case)
        near = {"rel": 0, "abs": BOUNDS.get(case, 1e-12)}
        assert found["losses"] == pytest.approx(expected["losses"], **near), (other, case)
        assert found["metrics"] == pytest.approx(expected["metrics"], **near), (other, case)
        for name, value in expected["weights"].items():
            assert found["weights"][name] == pytest.approx(value, **near), (other, case, name)
