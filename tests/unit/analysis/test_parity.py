"""The parts of `parity` that need no run: fingerprints, names, the noise floor, the verdict's text."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.html_page import Page
from unit.analysis.parity_samples import small_parity

import isotrain
from isotrain.analysis.parity import tensor_sketch, text
from isotrain.analysis.parity.divergence import SHRUNK, judge
from isotrain.analysis.parity.noise_floor import MARGIN, NoiseFloor, NoiseRun
from isotrain.analysis.parity.records import ParityRecord
from isotrain.analysis.parity.report import read_parity
from isotrain.analysis.parity.run_trace import RunTrace, StepTrace
from isotrain.analysis.parity.tensor_sketch import difference, fingerprint
from isotrain.analysis.parity.trace import steps_to_trace
from isotrain.core.errors import IsotrainError, SpecError
from isotrain.core.spec.training_spec import TrainingSpec
from isotrain.core.spec.weight_name_map import MappedTensor, read_maps, require_counterparts

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("apart", [1e-12, 1e-6, 0.1])
@pytest.mark.parametrize("shape", [(7,), (40, 50), (300, 4, 4, 3)])
def test_fingerprints_estimate_the_distance_of_tensors(
    shape: tuple[int, ...], apart: float
) -> None:
    generator = np.random.default_rng(1)
    estimates = []
    for _ in range(20):
        one = generator.normal(size=shape)
        other = one + apart * np.linalg.norm(one) * _unit(generator.normal(size=shape))
        estimates.append(difference(fingerprint(one), fingerprint(other)) / apart)
    assert np.mean(estimates) == pytest.approx(1.0, abs=0.15)
    assert min(estimates) > 0.4
    assert max(estimates) < 1.8


def _unit(array: np.ndarray) -> np.ndarray:
    return np.asarray(array / np.linalg.norm(array))


@pytest.mark.parametrize("shape", [(64, 64), (300, 70), (1024, 40), (10, 128)])
def test_fingerprints_see_a_low_rank_difference(shape: tuple[int, int]) -> None:
    """A sketch of regular blocks would miss a row or a column, and one of random signs some columns."""
    one = np.zeros(shape)
    places = [np.s_[row, :] for row in range(shape[0])] + [np.s_[:, i] for i in range(shape[1])]
    for place in (*places, np.s_[::32, 0], np.s_[:, :]):
        other = one.copy()
        other[place] = 1.0
        assert difference(fingerprint(one), fingerprint(other)) > 0.5


def _patterns(shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Differences of +1 and -1, and of 1 and 0, that repeat along an axis, of all elements or a column."""
    found = {"equal": np.ones(shape)}
    for axis, size in enumerate(shape):
        places = np.arange(size).reshape([-1 if each == axis else 1 for each in range(len(shape))])
        for half in (1, 2, 3, 16, 31, 32, 512, 1024):
            if half < size:
                name = f"axis {axis}, period {2 * half}"
                found[name] = np.broadcast_to(1.0 - 2.0 * (places // half % 2), shape)
                found[f"{name}, 1 and 0"] = np.maximum(found[name], 0.0)
                found[f"{name}, one of all"] = np.broadcast_to(1.0 * (places % half == 0), shape)
    for name, pattern in list(found.items()):
        column = np.zeros(shape)
        column[:, :1] = pattern[:, :1]
        found[f"{name}, a column"] = column
    return found


@pytest.mark.parametrize(
    "shape",
    [(2048, 1), (2047, 2), (4096, 3), (1, 3000), (3, 1000), (5000,), (320,), (93,), (1024, 64),
     (100, 62), (300, 200), (64, 16, 3, 3), (3, 3, 8, 16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
def test_fingerprints_see_what_repeats_along_an_axis(shape: tuple[int, ...], turned: bool) -> None:
    """Signs that are equal in all blocks would cancel a period of a block: most of all in few columns."""
    if len(shape) == 1 and turned:
        pytest.skip("a vector has one order")
    ratios = []
    for name, pattern in _patterns(shape if len(shape) > 1 else (*shape, 1)).items():
        apart = np.array(pattern.reshape(shape), "float32", order="F" if turned else "C")
        estimate = tensor_sketch.distance(fingerprint(np.zeros_like(apart)), fingerprint(apart))
        ratios.append(estimate / float(np.linalg.norm(apart)))
        assert 0.35 < ratios[-1] < 1.65, name
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.15)
    assert np.std(ratios) < 0.25


def test_fingerprints_are_linear() -> None:
    generator = np.random.default_rng(2)
    arrays = [generator.normal(size=(30, 30)) for _ in range(3)]
    combined = tensor_sketch.mean([fingerprint(array) for array in arrays])
    assert difference(combined, fingerprint(np.mean(arrays, axis=0))) < 1e-14


def test_fingerprints_travel_as_json() -> None:
    for array in (np.arange(5), np.linspace(0, 1, 100, dtype="float32"), np.array(3.5)):
        taken = fingerprint(array)
        assert tensor_sketch.from_list(json.loads(json.dumps(taken.to_list()))) == taken


@pytest.mark.parametrize("axes", [(1, 0), (3, 2, 0, 1), (2, 0, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize(
    "sizes", [(0, 1), (1, 80), (19, 11), (1500, 30), (20, 9000), (9000, 20)], ids=str
)
def test_fingerprints_do_not_depend_on_the_order_of_the_memory(
    axes: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    """Kernels of Keras are turned; all but the order of sums is equal, in each way to read the memory."""
    shape = [3] * len(axes)
    shape[axes[0]], shape[axes[1]] = sizes
    for dtype, rounding in (("float32", 1e-6), ("float64", 1e-14)):
        turned = np.random.default_rng(0).normal(size=shape).astype(dtype).transpose(axes)
        one, other = fingerprint(turned), fingerprint(np.array(turned, order="C"))
        assert one.sample == other.sample
        assert one.norm == pytest.approx(other.norm, rel=rounding)
        assert difference(one, other) < rounding


def test_fingerprints_of_float32_are_those_of_float64() -> None:
    """Also where squares of float32 would overflow or vanish."""
    values = np.random.default_rng(0).normal(size=(700, 300))
    for scale in (1.0, 1e-30, 1e30, 0.0):
        one = (scale * values).astype("float32")
        assert difference(fingerprint(one), fingerprint(one.astype(float))) < 1e-6
        norm = float(np.linalg.norm(one.astype(float)))
        assert fingerprint(one).norm == pytest.approx(norm, rel=1e-6)


def test_numbers_that_are_not_finite() -> None:
    one, lost = fingerprint(np.ones(100)), fingerprint(np.full(100, math.nan))
    assert difference(one, lost) == math.inf
    assert difference(lost, lost) == 0.0
    assert difference(fingerprint(np.zeros(3)), fingerprint(np.zeros(3))) == 0.0


def test_axes_are_permuted_and_restored() -> None:
    kernel = np.arange(3 * 4 * 2 * 5).reshape(3, 4, 2, 5)
    target = MappedTensor("x", "HWIO->OIHW")
    assert np.array_equal(target.to_common(kernel), kernel.transpose(3, 2, 0, 1))
    assert np.array_equal(target.to_model(target.to_common(kernel)), kernel)


def test_flattened_axes_are_permuted_and_restored() -> None:
    target = MappedTensor("x", "(HWC)O->O(CHW)", {"H": 3, "W": 4})
    dense = np.arange(3 * 4 * 2 * 5).reshape(3 * 4 * 2, 5)
    expected = dense.reshape(3, 4, 2, 5).transpose(3, 2, 0, 1).reshape(5, -1)
    assert np.array_equal(target.to_common(dense), expected)
    assert np.array_equal(target.to_model(expected), dense)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "expected, per framework"),
        ({"torch": 3}, "expected, per framework"),
        ({"torch": {"a": {"axes": "AB->BA"}}}, "torch: a"),
        ({"torch": {"a": {"name": "x", "axis": "AB->BA"}}}, "unknown axis"),
        ({"torch": {"a": {"name": "x", "axes": "AB->AC"}}}, "same letters"),
        ({"torch": {"a": {"name": "x", "axes": "AB"}}}, "expected such as"),
        ({"torch": {"a": "x", "b": "x"}}, "more than one tensor becomes x"),
        ("no/such/file.yaml", "cannot be read"),
    ],
)
def test_wrong_maps_are_refused(given: Any, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        read_maps(given)


def test_a_shape_that_does_not_fit_the_axes_is_refused() -> None:
    with pytest.raises(SpecError, match="name 4 axes"):
        MappedTensor("x", "HWIO->OIHW").to_common(np.zeros((2, 2)))
    with pytest.raises(SpecError, match=r"axis \(HWC\) has length 10"):
        MappedTensor("x", "(HWC)O->O(CHW)", {"H": 3, "W": 4}).to_common(np.zeros((10, 2)))


def test_weights_without_counterpart_are_named() -> None:
    names = read_maps(EXAMPLES / "digits_native_names.yaml")["tensorflow"]
    weights = [f"{layer}.{kind}" for layer in (2, 4, 8, 10) for kind in ("weight", "bias")]
    require_counterparts(list(names.targets), weights, names)
    with pytest.raises(IsotrainError, match=r"Only here: 10.bias. Only in the reference: other"):
        require_counterparts(list(names.targets), [*weights[:-1], "other"], names)


@pytest.mark.parametrize(
    ("samples", "total", "expected"),
    [(40, 10, [0, 1, 2, 3]), (60, 16, [0, 1, 2, 7]), (64, 16, [0, 1, 2, 3]), (60, 6, [0, 1, 2, 3])],
)
def test_the_first_smaller_batch_is_traced(samples: int, total: int, expected: list[int]) -> None:
    plan: Any = SimpleNamespace(
        samples=samples, global_batch_size=8, steps_per_epoch=-(-samples // 8), total_steps=total
    )
    assert steps_to_trace(plan, 4) == expected


def traced(weight: np.ndarray, precision: str = "float32", loss: float = 1.0) -> RunTrace:
    """A run of one step in which only a weight and the loss can differ."""
    gradient = {"w": fingerprint(np.ones(80))}
    tensors: Any = {"gradient": gradient, "reduced": gradient, "optimizer": {}, "state": {}}
    tensors["weight"] = {"w": fingerprint(weight)}
    copies = {stage: [own] for stage, own in tensors.items()}
    step = StepTrace(0, 8, [8], True, loss, 0.1, copies, tensors)
    start: Any = {"weight": {"w": fingerprint(np.zeros(80))}, "optimizer": {}, "state": {}}
    plan = {"precision": precision}
    return RunTrace("run", precision, 1, [step], start, start, gradient, 1.0, plan)


RIGHT = np.linspace(1, 2, 80)
SPEC = TrainingSpec(
    model=len,
    data=len,
    loss="mse",
    optimizer={"name": "sgd", "lr": 0.1},
    global_batch_size=8,
    steps=1,
    name="unit",
)


def in_float64(apart: float) -> Any:
    """What a second look finds: runs that are so far apart in float64."""
    reference = traced(RIGHT, "float64")
    floor = NoiseFloor(reference, [NoiseRun(traced(RIGHT * (1 + 1e-7)), 2.0**-29)])
    return lambda: (traced(RIGHT * (1 + apart), "float64"), reference, floor)


@pytest.mark.parametrize(
    ("apart", "left", "status"),
    [
        (0.0, None, "equal"),
        (4e-6, None, "rounding"),
        (1e-4, 1e-12, "rounding"),
        (1e-4, 1e-4, "difference"),
        (1e-4, 1e-4 * SHRUNK * 0.5, "rounding"),
    ],
)
def test_float64_tells_rounding_from_a_difference(
    apart: float, left: float | None, status: str
) -> None:
    reference = traced(RIGHT)
    floor = NoiseFloor(reference, [NoiseRun(traced(RIGHT * (1 + 5e-7), "float64"), 1.0)])
    again = in_float64(left) if left is not None else lambda: pytest.fail("looked twice")
    found = judge(SPEC, traced(RIGHT * (1 + apart)), reference, floor, None, again)
    assert found.status == status, found
    if status == "difference":
        assert found.first is not None
        assert (found.first.stage, found.first.precision) == ("weight", "float64")
        assert [cause.code for cause in found.causes] == ["learning-rate"]


def test_the_noise_floor_is_a_multiple_of_the_measured_noise() -> None:
    reference = traced(RIGHT)
    floor = NoiseFloor(reference, [NoiseRun(traced(RIGHT * (1 + 1e-3)), 1.0)])
    assert floor.at(0, "weight", "w") == pytest.approx(MARGIN * 1e-3, rel=0.5)
    assert floor.at(0, "gradient", "w") == MARGIN * 4 * 2.0**-23


def test_a_result_is_shown_as_text_json_and_html() -> None:
    found = small_parity()
    lines = text.result(found).splitlines()
    assert lines[0] == "DIFFERENCE: b@1 does not"
    assert any("process 0 died" in line for line in lines)
    assert "b@1, step by step:" in lines
    assert json.loads(found.to_json())["format"] == 1
    assert "b@1 does not" in found._repr_html_()
    assert "it &lt;parts&gt;" in found._repr_html_()
    assert found.run("b@1").status == "difference"


def test_the_page_has_the_figures_of_the_file(tmp_path: Path) -> None:
    found = small_parity()
    (tmp_path / "parity.json").write_text(found.to_json())
    assert read_parity(tmp_path) == ParityRecord(**vars(found))
    path = found.to_html(tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    assert "it <parts>" in page.text
    assert "process 0 died" in page.text
    assert "b@1 9" in page.text  # the weight, in noise floors
    assert "no such thing" in page.text
    assert not page.of("script")
    links = [str(link["href"]).removeprefix("#") for link in page.of("a")]
    assert set(links) <= {given.get("id") for _, given in page.elements}


def test_the_page_has_the_reason_of_a_failed_run(tmp_path: Path) -> None:
    parity = small_parity()
    parity = replace(parity, runs=[parity.runs[0], parity.runs[2]])
    page = Page(parity.to_html(tmp_path).read_text(encoding="utf-8"))
    assert "c@1: failed whyprocess 0 died" in page.text
    assert "Nowhere" not in page.text


def test_a_single_run_is_refused() -> None:
    with pytest.raises(isotrain.PlanError, match="nothing to compare"):
        isotrain.parity(SPEC, backends=["torch-ddp"])


def test_a_single_strategy_needs_no_list() -> None:
    with pytest.raises(isotrain.PlanError, match="nothing to compare"):
        isotrain.parity(SPEC, backends="torch-ddp", strategies="gossip")


def test_to_pandas_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(IsotrainError, match="pip install pandas"):
        small_parity().to_pandas()
