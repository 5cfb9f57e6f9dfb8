"""Searches for a learning rate and for the largest global batch."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.session_specs import spec

import isotrain
from isotrain.analysis.find.rate import has_diverged, smoothed_losses, steepest_rate
from isotrain.core.cli.main import main

pytestmark = pytest.mark.usefixtures("reference")

ROOM = 5


def out_of_memory(inputs: np.ndarray, targets: np.ndarray, random: Any) -> Any:
    if len(inputs) > ROOM:
        raise MemoryError("simulated")
    return inputs, targets


def killed(inputs: np.ndarray, targets: np.ndarray, random: Any) -> Any:
    if len(inputs) > ROOM:
        os.kill(os.getpid(), signal.SIGKILL)
    return inputs, targets


def broken(inputs: np.ndarray, targets: np.ndarray, random: Any) -> Any:
    raise ValueError("not a matter of memory")


def test_the_suggestion_is_where_the_loss_falls_fastest() -> None:
    rates = [10.0 ** (-4 + step / 20) for step in range(100)]
    losses = [2 - math.tanh(2 * (math.log10(rate) + 2)) for rate in rates]
    suggestion = steepest_rate(rates, smoothed_losses(losses))
    assert suggestion is not None
    assert 0.005 < suggestion < 0.2  # smoothing comes late
    assert steepest_rate(rates, [1.0] * 100) is None
    assert steepest_rate(rates[:2], [1.0, 0.5]) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"updates": {"first": {}, "last": {}}}, r"updates \(first, last\), each with a rate"),
        ({"data": None, "epochs": None, "steps": 3}, "data: the spec has none"),
    ],
)
def test_specs_without_one_rate_or_without_data_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(isotrain.SpecError, match=message):
        isotrain.find_rate(spec(**fields), backend="reference")


def test_smoothed_losses_are_weighted_means() -> None:
    assert smoothed_losses([3.0] * 5) == pytest.approx([3.0] * 5)
    assert smoothed_losses([1.0, 3.0]) == pytest.approx([1.0, (0.95 + 3) / 1.95])


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1.0], False),
        ([-1.0], False),
        ([-1.0, -2.0, -3.0], False),
        ([1.0, 0.5, 60.0], True),
        ([-1.0, -1.0, 60.0], True),
        ([1.0, float("nan")], True),
    ],
)
def test_a_loss_diverges_from_the_least_also_below_zero(
    losses: list[float], expected: bool
) -> None:
    assert has_diverged(losses) is expected


@pytest.mark.slow
def test_the_rate_rises_until_the_loss_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    search = isotrain.find_rate(
        spec(scaling={"rule": "linear", "base_batch_size": 2}),
        backend="reference",
        replicas=2,
        first_rate=1e-3,
        last_rate=1e6,
        steps=40,
    )
    assert len(search.rates) == len(search.losses) < 40
    ratio = (1e6 / 1e-3) ** (1 / 39)
    assert np.divide(search.rates[1:], search.rates[:-1]) == pytest.approx(ratio)
    assert search.suggestion in search.rates
    assert search.lr == search.suggestion / 2
    search.plot(tmp_path / "rates.png")
    search.plot(tmp_path / "rates.svg")
    assert (tmp_path / "rates.png").read_bytes()[:4] == b"\x89PNG"
    assert "fastest at learning rate" in (tmp_path / "rates.svg").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("transform", [out_of_memory, killed])
def test_the_largest_batch_is_found_although_processes_die(transform: Any) -> None:
    search = isotrain.find_batch(
        spec(transform=transform), backend="reference", replicas=2, first_batch=2, steps=1
    )
    sizes = [(each.global_batch_size, each.fits) for each in search.trials]
    assert sizes == [(2, True), (4, True), (8, True), (12, False), (10, True), (11, False)]
    assert (search.largest, search.samples) == (10, 12)
    assert all((each.reason is None) == each.fits for each in search.trials)


def test_a_search_ends_at_the_largest_batch_to_try() -> None:
    search = isotrain.find_batch(spec(), backend="reference", first_batch=2, largest_batch=6)
    assert [each.global_batch_size for each in search.trials] == [2, 4, 6]
    assert search.fastest in (2, 4, 6)


def test_other_failures_end_the_search() -> None:
    with pytest.raises(isotrain.RunFailedError, match="not a matter of memory"):
        isotrain.find_batch(spec(transform=broken), backend="reference")


def test_wrong_bounds_are_refused() -> None:
    with pytest.raises(isotrain.SpecError, match="find_rate: expected 0 < first_rate < last_rate"):
        isotrain.find_rate(spec(), backend="reference", first_rate=1.0, last_rate=0.5)
    with pytest.raises(
        isotrain.SpecError, match="find_batch: expected first_batch, largest_batch and steps"
    ):
        isotrain.find_batch(spec(), backend="reference", first_batch=0)


def test_processes_of_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for search in (isotrain.find_rate, isotrain.find_batch):
        with pytest.raises(isotrain.UnsupportedError, match=r"find_\w+: torchrun has started 2"):
            search(spec(), backend="reference")


def test_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    fields = spec(
        model="integration.session_specs:network", data="integration.session_specs:samples"
    )
    (tmp_path / "spec.json").write_text(json.dumps(fields), encoding="utf-8")
    common = ["spec.json", "--backend", "reference", "--plugin", "isotrain.testing.reference"]
    assert main(["find", "rate", *common, "--steps", "12", "--first-rate", "0.01"]) == 0
    assert "the smoothed loss falls" in capsys.readouterr().out
    assert main(["find", "batch", *common, "--largest-batch", "8", "--json"]) == 0
    printed = capsys.readouterr()
    assert (json.loads(printed.out)["format"], json.loads(printed.out)["largest"]) == (1, 8)
    assert not printed.err
    assert main(["find", "batch", *common, "--output", "rates.png"]) != 0
    assert "--output is no option of `find batch`" in capsys.readouterr().err
