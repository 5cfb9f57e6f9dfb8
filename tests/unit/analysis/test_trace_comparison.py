"""Comparisons of traces: which tensors, steps and options of two programs are compared, and what is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.analysis.program_trace.comparison import compare
from isotrain.analysis.program_trace.keras_axes import kernel_axes
from isotrain.analysis.program_trace.names import counterparts
from isotrain.analysis.program_trace.reading import ProgramTrace, read_trace
from isotrain.analysis.program_trace.recorder import Recorder
from isotrain.core.errors import IsotrainError, PlanError

RATE = {"lr": 0.1}


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


TORCH = {
    "encoder.weight": drawn(8, 4, seed=1),
    "encoder.bias": np.zeros(8, np.float32),
    "head.weight": drawn(8, 8, seed=2),
    "head.bias": np.zeros(8, np.float32),
}
KERAS = {
    "net/encoder/kernel": TORCH["encoder.weight"].T,
    "net/encoder/bias": TORCH["encoder.bias"],
    "net/head/kernel": TORCH["head.weight"].T,
    "net/head/bias": TORCH["head.bias"],
}


def traced(
    folder: Path,
    weights: Mapping[str, np.ndarray],
    *,
    steps: int = 3,
    optimizers: int = 1,
    factors: Mapping[int, float] | None = None,
    options: Mapping[str, Any] = RATE,
    buffers: Mapping[str, np.ndarray] | None = None,
    samples: Sequence[np.ndarray] = (drawn(6, 4, seed=9),),
    evaluations: int = 0,
) -> ProgramTrace:
    """The trace of a program that descends along its weights; in step `i` `factors[i]` times as far.

    Each step is followed by so many evaluations.
    """
    folder.mkdir()
    recorder = Recorder(folder, steps + 1)
    recorder.set_rank(0, 1)
    values = {name: array.copy() for name, array in weights.items()}
    passes = {"training": True, "dropout": False, "batch_norm": False, "autocast": False}
    for step in range(steps):
        rows = recorder.rows(list(samples)) if samples else []
        for optimizer in range(optimizers):
            recorder.event("forward", rows=rows, gradients=True, wrapper="Net", random={}, **passes)
            recorder.event("backward", loss=1.0)
            start = {} if step else recorder.start(values, buffers or {})
            gradient = {n: v * (factors or {}).get(step, 1.0) for n, v in values.items()}
            values = {name: value - 0.1 * gradient[name] for name, value in values.items()}
            group = {"optimizer": "SGD", "dtype": "float32", "names": [*values]}
            recorder.step(
                optimizer,
                {
                    **start,
                    "groups": [{**group, "options": dict(options)}],
                    "gradient": recorder.fingerprints(gradient),
                    "weight": recorder.fingerprints(values),
                },
            )
        for _ in range(evaluations):
            recorder.event(
                "forward", rows=rows, gradients=False, wrapper="Net", random={}, **passes
            )
    recorder.end()
    return read_trace(folder)


def test_layers_of_two_frameworks_are_matched_by_their_names(tmp_path: Path) -> None:
    """Biases have names in common; kernels, which have none, those of their layer."""
    one, two = traced(tmp_path / "one", TORCH), traced(tmp_path / "two", KERAS)
    found = compare(one, two)
    assert found.agree, found.differences
    assert found.notes == [
        "matched by name, without prefixes: net/encoder/bias is encoder.bias, net/head/bias is head.bias",
        "matched by layer and shape: net/encoder/kernel is encoder.weight, net/head/kernel is head.weight",
    ]
    fast = traced(tmp_path / "fast", KERAS, factors={0: 1.5})
    differing = {each.name for each in compare(one, fast).differences}
    assert differing == {"encoder.weight", "head.weight"}


def test_what_is_left_is_matched_by_initial_values_else_in_order(tmp_path: Path) -> None:
    squares = {"a": drawn(5, 5, seed=3), "b": drawn(5, 5, seed=4), "common": drawn(2, seed=5)}
    turned = {"y": squares["b"], "x": squares["a"], "common": squares["common"]}
    found = compare(traced(tmp_path / "one", squares), traced(tmp_path / "two", turned))
    assert found.agree, found.differences
    assert found.notes == ["matched by shape and initial values: y is b, x is a"]
    other = {"x": drawn(5, 5, seed=6), "y": drawn(5, 5, seed=7), "common": squares["common"]}
    found = compare(traced(tmp_path / "three", squares), traced(tmp_path / "four", other))
    assert (found.differences[0].stage, len(found.differences)) == ("initial", 2)
    assert found.notes == ["matched by shape and order: x is a, y is b"]


def test_what_would_be_a_guess_is_not_matched() -> None:
    match = counterparts({"p": [3], "q": [3], "r": [2]}, {"a": [3], "b": [3], "c": [3], "d": [2]})
    assert match.names == {"r": "d"}
    assert match.ambiguous == [
        "not matched, because it would be a guess: of shape [3] there are p, q; and in the other program"
        " a, b, c"
    ]
    assert not counterparts({"p": [3]}, {"a": [4]}).ambiguous


def test_weights_are_no_counterparts_of_buffers(tmp_path: Path) -> None:
    weights, buffers = {"scale": drawn(3, seed=1)}, {"mean": drawn(3, seed=2)}
    one = traced(tmp_path / "one", weights, buffers=buffers)
    two = traced(
        tmp_path / "two", {"gamma": weights["scale"]}, buffers={"average": buffers["mean"]}
    )
    assert compare(one, two).notes == [
        "matched by shape and order: gamma is scale",
        "matched by shape and order: average is mean",
    ]


def test_programs_with_nothing_in_common_do_not_agree(tmp_path: Path) -> None:
    one = traced(tmp_path / "one", {"a": drawn(5), "b": drawn(2, 2)})
    two = traced(tmp_path / "two", {"c": drawn(6)})
    told = (
        r"two and .*one have no weight in common, .* The one trains c \[6\]; the other one trains a \[5\],"
        r" b \[2, 2\]\."
    )
    with pytest.raises(IsotrainError, match=told):
        compare(one, two)


def test_what_only_one_program_has_is_told(tmp_path: Path) -> None:
    one = traced(tmp_path / "one", {"a": drawn(5), "b": drawn(2, 2)}, steps=5, samples=())
    two = traced(tmp_path / "two", {"a": drawn(5)})
    found = compare(one, two)
    assert (found.agree, found.steps) == (True, 3)
    assert found.notes == [
        "samples of the reference are not recorded, and not compared",
        "parameters of the reference alone, not compared: b",
        "steps of the reference alone, not compared: 2",
    ]


def test_as_many_steps_as_asked_for_are_compared(tmp_path: Path) -> None:
    one = traced(tmp_path / "one", TORCH)
    two = traced(tmp_path / "two", TORCH, factors={2: 1.5})
    assert compare(one, two).differences[0].step == 2
    found = compare(one, two, steps=2)
    assert (found.agree, found.steps, found.notes) == (True, 2, [])
    with pytest.raises(PlanError, match=r"expected at least 4 steps in .*one, found 3"):
        compare(one, two, steps=4)


def test_evaluations_are_compared_as_far_as_both_programs_go(tmp_path: Path) -> None:
    short, long = (traced(tmp_path / str(n), TORCH, steps=n, evaluations=1) for n in (2, 4))
    assert compare(long, short).agree
    assert compare(short, long).agree
    twice = traced(tmp_path / "twice", TORCH, steps=4, evaluations=2)
    assert compare(long, twice).causes[0].code == "evaluation-repeats-samples"
    assert compare(long, twice, steps=1).agree, "no evaluation is before the first step"


def test_evaluations_of_one_program_alone_are_told(tmp_path: Path) -> None:
    with_them = traced(tmp_path / "with", TORCH, evaluations=1)
    without = traced(tmp_path / "without", TORCH)
    for reference, run, owner in ((without, with_them, "reference"), (with_them, without, "run")):
        found = compare(reference, run)
        assert found.agree
        told = f"evaluations are not compared: the {owner} has none in these steps"
        assert found.notes == [told]
    assert not compare(with_them, with_them).notes


@pytest.mark.parametrize(
    ("name", "shape", "axes"),
    [
        ("dense/kernel", (4, 8), "IO->OI"),
        ("net/rnn/recurrent_kernel/momentum", (4, 8), "IO->OI"),
        ("net/dense/kernel#2", (4, 8), "IO->OI"),
        ("conv/kernel", (3, 3, 4, 8), "HWIO->OIHW"),
        ("dense/bias", (8,), None),
        ("kernel", (4, 8), None),
        ("kernel/exp_avg", (4, 8), None),
        ("conv.kernel", (4, 8), None),
    ],
)
def test_kernels_within_layers_of_keras_have_other_axes(
    name: str, shape: Sequence[int], axes: str | None
) -> None:
    assert kernel_axes(name, len(shape)) == axes


@pytest.mark.parametrize("options", [({}, RATE), (RATE, {}), ({}, {})])
def test_an_optimizer_need_have_no_learning_rate(
    options: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    """Nor an option that only one of the programs has."""
    one, two = (
        traced(tmp_path / str(index), weights, options=each)
        for index, (weights, each) in enumerate(zip((TORCH, KERAS), options, strict=True))
    )
    assert compare(one, two).agree
    others = traced(tmp_path / "others", {"c": drawn(7)})
    with pytest.raises(IsotrainError, match="no weight in common"):
        compare(one, others)
    faster = traced(tmp_path / "faster", KERAS, options={"lr": 0.3})
    assert compare(two, faster).agree == ("lr" not in options[1])
