"""Requests of comparisons: arguments, folders to continue in, and interpreters of the runs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.analysis.comparison_cells import cell, comparison

from isotrain.analysis.compare import store
from isotrain.analysis.compare.measurement.runner import Runner
from isotrain.analysis.compare.measurement.runner_main import run_task
from isotrain.analysis.compare.settings import CompareRequest
from isotrain.core.cli.commands.compare import COMPARE
from isotrain.core.errors import IsotrainError, PlanError, UnsupportedError
from isotrain.core.spec.loading import load_spec


def test_only_the_same_comparison_is_resumed(tmp_path: Path) -> None:
    made = comparison(cell("a@1", 1.0))
    more = replace(made, settings={"steps": 20, "repeats": 9})
    store.check_same(made, more, tmp_path)  # more of the same
    for other, told in (
        (replace(made, spec={"seed": 1}), "spec.seed was 0, now 1"),
        (replace(made, settings={"steps": 5}), "settings.steps was 20, now 5"),
        (replace(made, machine={"cores": 4}), "machine.cores was 2, now 4"),
        (comparison(cell("b@1", 1.0)), "cells were a@1"),
    ):
        with pytest.raises(PlanError, match=told):
            store.check_same(made, other, tmp_path)


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    store.write(comparison(cell("a@1", 1.0)), tmp_path)
    with pytest.raises(PlanError, match="--resume"):
        store.new_folder("n", tmp_path)


def test_a_variable_names_the_folder_of_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISOTRAIN_COMPARISONS", raising=False)
    assert store.new_folder("n", None).resolve().parent == tmp_path / "comparisons"
    monkeypatch.setenv("ISOTRAIN_COMPARISONS", str(tmp_path / "elsewhere"))
    made = store.new_folder("n", None)
    assert (made.parent, made.is_dir()) == (tmp_path / "elsewhere", True)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"replicas": [1, 0]}, "replicas"),
        ({"replicas": []}, "replicas"),
        ({"repeats": 0}, "repeats"),
        ({"time_budget": 0.0}, "time budget"),
        ({"margin": 1.5}, "margin"),
        ({"resume": "one", "output": "two"}, "--output"),
    ],
)
def test_wrong_requests_are_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        CompareRequest(**fields)


def test_arguments_have_readable_forms() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    COMPARE.add_arguments(parser)

    def read(*given: str) -> argparse.Namespace:
        return parser.parse_args(["spec.yaml", *given])

    assert read("--replicas", "1, 2").replicas == [1, 2]
    assert read("--time-budget", "1h30m").time_budget == 5400
    assert read("--time-budget", "90").time_budget == 90
    assert read("--fail-if-slower", "5%").fail_if_slower == pytest.approx(0.05)
    assert read("--interpreter", "a=/x=y").interpreter == [("a", "/x=y")]
    for wrong in (
        ("--time-budget", "soon"),
        ("--fail-if-slower", "200%"),
        ("--interpreter", "/x"),
        ("--replicas", "1,b"),
    ):
        with pytest.raises(argparse.ArgumentError, match="expected"):
            read(*wrong)


def elsewhere(python: str) -> Any:
    """Plans a run of a backend, with a collective that it does not have, in another interpreter."""
    spec = {
        "model": "json:loads",
        "data": "json:loads",
        "loss": "mse",
        "optimizer": {"name": "sgd", "lr": 0.5},
    }
    made = load_spec({**spec, "global_batch_size": 4, "steps": 1})
    return Runner({"torch-ddp": python}).plan(made, "torch-ddp:pigeons", 2)


def test_an_error_of_another_interpreter_is_raised_here() -> None:
    with pytest.raises(UnsupportedError, match=rf"pigeons.*\(in {sys.executable}\)"):
        elsewhere(sys.executable)


def test_an_interpreter_that_does_not_answer_is_named() -> None:
    with pytest.raises(IsotrainError, match="/bin/false ended with exit code 1 before it answered"):
        elsewhere("/bin/false")


def test_another_version_is_refused() -> None:
    with pytest.raises(PlanError, match=r"made by 0\.0\.1: they may measure in different ways"):
        run_task({"do": "plan", "version": "0.0.1"})
