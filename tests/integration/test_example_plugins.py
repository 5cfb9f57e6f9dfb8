"""The examples of plugins, really installed: a backend on a third framework, and a strategy."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import check_strategies, spec_variety, trained_cases
from conformance.tolerances import EXACT, assert_equal_runs, distance
from helpers import jax_install
from helpers.isolated import run_isolated
from integration import sharded_cases, test_export
from plugins import example_backend_runs, example_sharded_runs
from plugins.example_plugin_tests import EXAMPLES

import isotrain
from isotrain.testing import backend, strategy
from isotrain.testing.consecutive_sessions import launched_in_turn

pytestmark = [
    pytest.mark.examples,
    pytest.mark.timeout(600),
]  # the first waits for most of what others look at

PACKAGES = ("plugin_backend_jax", "plugin_strategy_slowmo")

ROUGH_BOUNDS = {"bfloat16": 3e-2, "float16-clipped": 4e-3}
"""A few roundings of the half precisions, which each framework makes at other places."""

CLOSE = 1e-12
WHOLE, GONE_ON, GONE_ON_FROM_SHARES = "whole", "gone on", "gone on from shares"

Variables = dict[str, str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Variables:
    """Variables of an environment in which both packages are installed, and JAX is not."""
    folder = tmp_path_factory.mktemp("plugins")
    for package in PACKAGES:  # pip builds in the sources' own folder
        shutil.copytree(EXAMPLES / package, folder / package)
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([*pip, *(str(folder / package) for package in PACKAGES)], check=True)
    return with_path({**os.environ, "PYTEST_ADDOPTS": ""}, site)


@pytest.fixture(scope="module")
def with_jax(installed: Variables, tmp_path_factory: pytest.TempPathFactory) -> Variables:
    """Variables with JAX, which caches what it compiles for the next run."""
    kept = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": " ".join(jax_install.QUICK_TO_COMPILE),
    }
    return {**with_path(installed, jax_install.folder()), **kept}


def with_path(variables: Variables, folder: Path) -> Variables:
    return {**variables, "PYTHONPATH": os.pathsep.join([str(folder), variables["PYTHONPATH"]])}


def python(variables: Variables, *arguments: str) -> str:
    """Runs Python in that environment; gives its output."""
    finished = subprocess.run(
        [sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-4000:]
    return finished.stdout


def exported(session: isotrain.Session, *, folder: Path, samples: np.ndarray) -> Any:
    """Writes Keras' own files; gives what is to be predicted by who opens them."""
    session.group.export("keras", folder / "model.keras", None)
    session.group.export("keras-weights", folder / "model.weights.h5", None)
    assert "tensorflow" not in sys.modules, "imported to write what has nothing of it"
    return session.predict((samples,))


@pytest.fixture(scope="module")
def found(with_jax: Variables, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What runs on the backend found; and Keras on its framework, of what another one has exported."""
    folder = tmp_path_factory.mktemp("found")
    np.save(folder / example_backend_runs.SAMPLES, test_export.IMAGES)
    work = functools.partial(exported, folder=folder, samples=test_export.IMAGES)
    inside = run_isolated(work, test_export.spec(), "torch-ddp", folder / "exporting")
    program = ("-m", "plugins.example_backend_runs", "jax-mesh", str(folder))
    python({**with_jax, "ISOTRAIN_TEST_BACKEND": "jax-mesh"}, *program)
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    with np.load(folder / "weights.npz") as weights:
        return {**found, "weights": dict(weights), "folder": folder, "inside": inside}


LISTING = """
import contextlib, io, json, sys
from isotrain.core.cli.main import main
found = []
for what in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([what, "--json"]) == 0
    found.append(json.loads(out.getvalue())[what])
assert not {"jax", "keras"} & set(sys.modules)
print(json.dumps(found))
"""


def listed(variables: Variables, *what: str) -> Any:
    """What isotrain lists of each, in one program, which loads no framework for it."""
    return json.loads(python(variables, "-c", LISTING, *what))


def test_plugins_are_found_by_entry_points(with_jax: Variables) -> None:
    """The strategy runs on every backend."""
    found, strategies = listed(with_jax, "plugins", "strategies")
    plugins = {p["distribution"]: p for p in found if p["source"] == "entry point"}
    assert plugins["isotrain-jax"]["registered"] == {"backends": ["jax-mesh"]}
    assert plugins["isotrain-slowmo"]["registered"] == {"strategies": ["slow-momentum"]}
    assert {p["status"] for p in plugins.values()} == {"loaded"}
    assert {p["api"] for p in plugins.values()} == {"1.0"}
    pairs = {strategy["name"]: strategy["backends"] for strategy in strategies}
    assert all(pair["supported"] for pair in pairs["slow-momentum"].values())
    refused = {name for name, own in pairs.items() if not own["jax-mesh"]["supported"]}
    assert refused == {
        *("pipeline", "pipeline,schedule=2bw", "pipeline,schedule=pipedream"),
        "tensor",
    }


def test_the_backend_is_unavailable_without_jax(installed: Variables) -> None:
    (backends,) = listed(installed, "backends")
    (backend,) = [row for row in backends if row["name"] == "jax-mesh"]
    assert (backend["available"], backend["reason"]) == (False, "jax is not installed")


def test_the_backend_passes_its_own_tests(found: dict[str, Any]) -> None:
    """It passes native equality and every check of the kit but those of what it lacks."""
    told = found["own tests"]
    assert f"{len(backend.CHECKS) - 6} passed, 7 skipped" in told, told
    assert "the backend has no bfloat16-collectives" in told


@pytest.mark.parametrize("name", check_strategies.OF_BACKENDS)
def test_builtin_strategies_keep_their_promises_on_the_backend(
    found: dict[str, Any], name: str
) -> None:
    """The strategies that come with isotrain run with 2 replicas."""
    assert [failures[name] for failures in found["strategies"]] == ["", ""]


def test_parameter_server_runs_on_the_backend(found: dict[str, Any]) -> None:
    """A synchronous run equals data-parallel, metrics included."""
    exchanged, parameter_server = found["epochs"]
    assert "accuracy" in exchanged
    assert parameter_server == pytest.approx(exchanged, rel=1e-12)


@pytest.mark.parametrize("other", ["torch-ddp", "tf-mirrored"])
def test_frameworks_agree(found: dict[str, Any], other: str) -> None:
    """In float64 three frameworks agree to the rounding of sums."""
    here = {"loss": found["losses"], "weights": found["weights"]}
    assert_equal_runs(here, trained_cases.trained(other, 2, example_backend_runs.CASE), EXACT)


def trained_on_torch(session: isotrain.Session, name: str, saved: str) -> dict[str, Any]:
    """Trains by the choices of a spec, as a sharded run, or from the checkpoint of one."""
    if name in (GONE_ON, GONE_ON_FROM_SHARES):
        besides = example_sharded_runs.SHARES if name == GONE_ON_FROM_SHARES else ""
        return example_sharded_runs.gone_on(session, saved + besides)
    return (
        example_sharded_runs.ended(session) if name == WHOLE else spec_variety.train(session, name)
    )


@pytest.fixture(scope="module")
def varied(found: dict[str, Any]) -> dict[str, Any]:
    """What another framework makes of some choices of a spec, and in the place of a sharded run."""
    specs = {name: spec_variety.SPECS[name] for name in example_backend_runs.VARIED}
    parallel = example_sharded_runs.spec(sharded_cases.PARALLEL)
    specs |= dict.fromkeys((WHOLE, GONE_ON, GONE_ON_FROM_SHARES), parallel)
    work = functools.partial(trained_on_torch, saved=str(found["folder"] / "sharded"))
    (trained,) = launched_in_turn(specs, work, "torch-ddp", 1)
    return trained


@pytest.mark.parametrize("name", example_backend_runs.VARIED)
def test_frameworks_agree_on_other_specs(
    found: dict[str, Any], varied: dict[str, Any], name: str
) -> None:
    """Losses, weights and evaluation agree with another optimizer, clipping and half precisions."""
    there = varied[name]
    with np.load(found["folder"] / f"{name}.npz") as here:
        keys = [key for key in there if "accuracy" not in key]
        apart = {key: distance(here[key], there[key]) for key in keys}
    bound = ROUGH_BOUNDS.get(name, EXACT)
    assert not {key: value for key, value in apart.items() if not value <= bound}


def test_sharded_runs_equal_data_parallel(found: dict[str, Any], varied: dict[str, Any]) -> None:
    """Stages 3 and 2 on 3 replicas, stage 3 on two hosts of 2, and resumed on torch."""
    expected = varied[WHOLE]
    rest = expected["losses"][sharded_cases.SAVED :]
    sharded = [each[kind] for each in found["sharded"] for kind in ("ended", "shares")]
    whole = [varied[GONE_ON], varied[GONE_ON_FROM_SHARES]]
    for ended in [*sharded, *found["gone on"], *whole]:
        np.testing.assert_allclose(ended["losses"], rest, rtol=CLOSE, atol=CLOSE)
        for kind in ("weights", "evaluation"):
            for name in expected[kind]:
                if "moving" not in name:  # which are of the slices of so many replicas
                    np.testing.assert_allclose(
                        ended[kind][name],
                        expected[kind][name],
                        rtol=CLOSE,
                        atol=CLOSE,
                        err_msg=name,
                    )


def test_each_device_has_a_third_of_weights_and_slots(found: dict[str, Any]) -> None:
    """Uneven arrays are padded, and arrays that are too short are replicated."""
    for each in found["sharded"]:
        assert each["bytes"]["told"] < 0.34 * each["bytes"]["all"]
        assert each["bytes"]["here"] < 0.35 * each["bytes"]["all"]
    parts = [each["parts"] for each in found["sharded"]]
    for slot in ("hidden/kernel", "optimizer/adam_w/hidden_kernel_velocity"):
        assert [own[slot] for own in parts] == [[[0, 85 * rank], [6, 85]] for rank in range(3)]
    assert [own["narrow/bias"] for own in parts] == [[[0], [2]], [[2], [2]], [[4], [0]]]
    assert [own["head/bias"] for own in parts] == [[None, None]] * 3


def test_each_replica_has_slots_of_its_own_weights(found: dict[str, Any]) -> None:
    """In stage 2 each slot is on one replica."""
    slots = [each["slots"] for each in found["sharded"]]
    assert [sum(own.values()) for own in slots] == [24480, 16320, 4688]
    names = [name for own in slots for name in own]
    assert len(set(names)) == len(names) == 16, "two for each weight"
    assert {verdict for verdict, _ in found["kit of shares"].values()} == {"passed"}, found[
        "kit of shares"
    ]


def test_the_fork_server_has_no_threads(found: dict[str, Any]) -> None:
    """Threads that JAX starts with its devices would not survive a fork."""
    assert found["threads of imports"] == 0


def test_keras_opens_what_another_framework_has_exported(found: dict[str, Any]) -> None:
    for opened in found["opened"]:
        np.testing.assert_allclose(opened, found["inside"], rtol=1e-4, atol=1e-5)


def test_losses_of_layers_count(found: dict[str, Any]) -> None:
    """Losses of layers count with a regulariser and without."""
    for loss, expected in found["own losses"]:
        assert loss == pytest.approx(expected, rel=EXACT)


def test_layer_traits_are_declared(found: dict[str, Any]) -> None:
    """`isotrain check` reads them."""
    assert found["traits"] == [["local-statistics", "BatchNormalization"]]


def test_the_strategy_has_the_right_numbers_on_the_backend(found: dict[str, Any]) -> None:
    """`test_new_plugin.py` runs its other tests on the reference backend."""
    assert "1 passed" in found["tests of the strategy"], found["tests of the strategy"]


@pytest.mark.parametrize("check", [check.name for check in strategy.CHECKS])
def test_the_strategy_keeps_its_promises_on_the_backend(found: dict[str, Any], check: str) -> None:
    """It passes all checks but those of promises that it does not make."""
    verdict, reason = found["kit of the strategy"][check]
    unpromised = (
        *("equals_data_parallel", "keeps_parameter_mean", "keeps_gradient_sum"),
        *("ordered_sums_keep_bits", "elastic_as_declared"),
    )
    assert verdict == ("skipped" if check in unpromised else "passed"), reason
