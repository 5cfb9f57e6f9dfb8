"""Shares by speed and parts that are left out change no bit that depends on who computes a part."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration.reproducible_models import CASES, EVERYTHING
from integration.session_specs import spec

import isotrain
from isotrain.core.contracts.backend import tree_sum
from isotrain.core.contracts.backend.tree_sum import sum_over_replicas
from isotrain.core.errors import SpecError
from isotrain.core.session.training import ordered_steps, part_shares
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.reference.layers import BatchNormalization, Dense
from isotrain.testing.reference.network import Network

SECONDS = [1.0, 2.0, 4.0]
"""Seconds of a part on each rank, by the tests' clock."""
SHARES = {"shares": {"every": 2}}
DEALT = [5, 2, 1]
"""Parts of each replica by these speeds."""
FEATURES = pytest.mark.features


def trained(session: isotrain.Session, name: str = "") -> dict[str, Any]:
    """All that a session computes, and the parts of each step; the clock moves with a rank's parts alone."""
    now, losses, counts, samples = 0.0, [], [], []
    history: dict[str, list[float]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_shares, "clock", lambda: now)
        for batch in session.batches():
            counts.append(batch.part_counts)
            samples.append([sum(each.count for each in slices) for slices in batch.slices])
            now += SECONDS[session.rank] * max(map(len, batch.slices))
            losses.append(float(session.step(batch)))
            if batch.is_last_of_epoch:
                for each, value in {**session.metrics(), **session.validate()}.items():
                    history.setdefault(each, []).append(value)
    numbers = {each: np.array(values) for each, values in {"losses": losses, **history}.items()}
    return {"counts": counts, "samples": samples, "numbers": numbers | session.read_state()}


def results_of(cases: dict[str, Any], backend: str, replicas: int) -> dict[str, list[Any]]:
    """Return values of `trained` by case, then by rank."""
    ranks = launched_in_turn(cases, trained, backend, replicas)
    return {case: [rank[case] for rank in ranks] for case in cases}


def require_same_numbers(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = one["numbers"], other["numbers"]
    assert first.keys() == second.keys()
    assert [n for n in first if first[n].tobytes() != second[n].tobytes()] == []


def require_same_bits(cases: dict[str, Any], backend: str) -> None:
    """Compares runs of three replicas of different speed with those of one."""
    slow = results_of({n: case | SHARES for n, case in cases.items()}, backend, 3)
    alone = results_of(cases, backend, 1)
    for case in cases:
        for rank in slow[case]:
            require_same_numbers(rank, alone[case][0])
        assert [rank["counts"] for rank in slow[case]] == [slow[case][0]["counts"]] * 3
        steps = len(alone[case][0]["counts"])
        assert slow[case][0]["counts"] == [[3, 3, 2]] * 3 + [DEALT] * (steps - 3)
        for step, (whole,) in enumerate(alone[case][0]["samples"]):
            assert sum(rank["samples"][step][0] for rank in slow[case]) == whole


def normalized() -> Network:
    last = Dense(5, 1, name="last")
    return Network([Dense(3, 5, "tanh", name="first"), BatchNormalization(5, name="bn"), last])


def trained_with_client(session: isotrain.Session, name: str) -> dict[str, Any]:
    """As `trained`, where the last of several replicas sums nothing; vectors of any length are cut."""

    def summed(replica: Any, *sums: Any, static: Any) -> Any:
        clients = (replica.replicas - 1,) * (replica.replicas > 1)
        return sum_over_replicas(replica, *sums, static=(static[0], clients))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_sum, "SMALL", 0)
        patch.setattr(ordered_steps, "sum_over_replicas", summed)
        return trained(session)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "reference",
        "torch-ddp",
        pytest.param("horovod-torch", marks=FEATURES),
        pytest.param("tf-multiworker", marks=FEATURES),
        pytest.param("horovod-tf", marks=FEATURES),
    ],
)
def test_sums_for_a_replica_with_a_slow_link_change_no_bit(
    backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "reference":
        request.getfixturevalue("reference")
        cases = {"plain": spec(reproducible="bits", model={"numpy": normalized})}
    else:
        cases = {"everything": EVERYTHING | {"epochs": 1}}
    alone = launched_in_turn(cases, trained_with_client, backend, 1)
    for rank in launched_in_turn(cases, trained_with_client, backend, 3):
        for case, found in rank.items():
            require_same_numbers(found, alone[0][case])


@pytest.mark.usefixtures("reference")
def test_a_slow_replica_gets_fewer_parts_of_the_same_batches() -> None:
    fields = {"reproducible": "bits", "metrics": ["mean_absolute_error"], "validation_split": 0.25}
    case = spec(**fields, model={"numpy": normalized}, global_batch_size=5)
    require_same_bits({"plain": case}, "reference")


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "torch-ddp",
        pytest.param("horovod-torch", marks=FEATURES),
        pytest.param("tf-multiworker", marks=FEATURES),
        pytest.param("horovod-tf", marks=FEATURES),
    ],
)
def test_a_slow_replica_changes_no_bit(backend: str) -> None:
    """With batch normalization, dropout by sample, masks, and losses divided by their number of words."""
    cases = {"everything": EVERYTHING, "tagger": CASES["tagger"]}
    require_same_bits({n: case | {"epochs": 4} for n, case in cases.items()}, backend)


def trained_ahead(session: isotrain.Session, name: str) -> dict[str, Any]:
    """As `trained`, in a loop that has the next two batches already when it takes a step."""
    now, losses, steps, counts = 0.0, [], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_shares, "clock", lambda: now)
        batches = session.batches()
        ahead = list(itertools.islice(batches, 2))
        while ahead:
            ahead += itertools.islice(batches, 1)
            batch = ahead.pop(0)
            now += SECONDS[session.rank] * max(map(len, batch.slices))
            losses.append(float(session.step(batch)))
            steps.append(batch.step)
            counts.append(batch.part_counts)
    numbers = {"losses": np.array(losses), **session.read_state()}
    return {"steps": steps, "counts": counts, "numbers": numbers}


@pytest.mark.usefixtures("reference")
def test_a_loop_that_reads_ahead_takes_each_step_once() -> None:
    """The batches that it has when shares are dealt anew are still cut as before."""
    case = spec(reproducible="bits", epochs=4)
    cases = {"equal": case, "by speed": case | SHARES}
    for equal, by_speed in [
        (rank["equal"], rank["by speed"])
        for rank in launched_in_turn(cases, trained_ahead, "reference", 3)
    ]:
        require_same_numbers(by_speed, equal)
        assert by_speed["steps"] == equal["steps"] == list(range(len(equal["steps"])))
        assert by_speed["counts"][:5] == [[3, 3, 2]] * 5
        assert by_speed["counts"][5:] == [DEALT] * (len(equal["steps"]) - 5)


def faulty() -> tuple[np.ndarray, np.ndarray]:
    """24 samples: one step of 8 has a target that is far too large, another one that is not a number."""
    draw = np.random.default_rng(5)
    inputs, targets = draw.standard_normal((24, 3)), draw.standard_normal((24, 1))
    targets[10] = 1e6
    targets[21] = np.nan
    return inputs, targets


KEPT = [[*range(8)], [8, 9, *range(11, 16)], [*range(16, 21), 22, 23]]
"""The other samples of each step."""
FAULTY: dict[str, Any] = {
    "data": faulty,
    "precision": "float64",
    "global_batch_size": 8,
    "epochs": 4,
    "shuffle": False,
    "metrics": ["mean_absolute_error"],
}
DROPPED = {"reproducible": "bits", "drop_outliers": 100.0}


def trained_without_faults(session: isotrain.Session) -> dict[str, Any]:
    """Trains on the samples without faults, on one process."""
    inputs, targets = faulty()
    losses: list[float] = []
    while not session.is_done:
        rows = KEPT[session.steps_done % 3]
        losses.append(float(session.step(session.batch(inputs[rows], targets[rows]))))
    return {"losses": np.array(losses), **session.read_state()}


def launched(
    folder: Path, backend: str, replicas: int, **fields: Any
) -> tuple[list[Any], list[str]]:
    """Return values of `trained` by rank, and the warnings of the run."""
    warnings: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "warning":
            warnings.append(event["text"])

    options: dict[str, Any] = {"output": folder / f"{backend} {replicas}", "on_event": listen}
    case = spec(**{**FAULTY, **DROPPED, **fields})
    ranks = isotrain.launch(trained, case, backend=backend, replicas=replicas, **options)
    return ranks, warnings


def require_dropped(backend: str, counts: tuple[int, ...], folder: Path) -> None:
    """Compares runs on so many replicas with each other, and with one that never sees the faulty samples."""
    plain = {name: value for name, value in FAULTY.items() if name not in ("data", "epochs")}
    fields = spec(**plain, data=None, epochs=None, steps=12)
    oracle = isotrain.launch(
        trained_without_faults,
        {name: value for name, value in fields.items() if value is not None},
        backend=backend,
        output=folder / "oracle",
        on_event=lambda event: None,
    )[0]
    first: dict[str, Any] | None = None
    for replicas in counts:
        ranks, warnings = launched(folder, backend, replicas, **SHARES)
        first = first or ranks[0]
        for results in ranks:
            require_same_numbers(results, first)
        assert len(warnings) == 8, warnings
        large, not_finite = warnings[:2]
        # A process with several replicas names its replica, too.
        several = replicas > 1 and len(ranks) == 1
        first_of, second_of = ("replica 0 of ", "replica 1 of ") if several else ("", "")
        assert large.startswith(
            f"step 1: part 2 of 8 of the global batch, from {first_of}rank 0 on "
        )
        assert "drop_outliers): its gradient norm is " in large
        rank = 1 if len(ranks) > 1 else 0
        assert not_finite.startswith(
            f"step 2: part 5 of 8 of the global batch, from {second_of}rank {rank} on "
        )
        assert not_finite.endswith("its loss or gradients are not finite, or too large.")
    assert first is not None
    for name, expected in oracle.items():
        np.testing.assert_allclose(first["numbers"][name], expected, rtol=1e-12, err_msg=name)


@pytest.mark.usefixtures("reference")
def test_parts_far_beyond_the_others_are_left_out(tmp_path: Path) -> None:
    require_dropped("reference", (1, 2, 3), tmp_path)


@pytest.mark.slow
@pytest.mark.features
@pytest.mark.parametrize(
    ("backend", "counts"),
    [
        ("torch-ddp", (1, 3)),
        ("tf-mirrored", (1, 3)),
        ("tf-multiworker", (2,)),
        ("horovod-tf", (2,)),
    ],
)
def test_every_backend_leaves_out_parts(
    backend: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    require_dropped(backend, counts, tmp_path)


@pytest.mark.usefixtures("reference")
def test_without_outliers_no_bit_changes() -> None:
    case = spec(reproducible="bits", global_batch_size=5)
    results = results_of({"all": case, "bounded": case | {"drop_outliers": 1e6}}, "reference", 2)
    require_same_numbers(results["all"][0], results["bounded"][0])


def half_faulty() -> tuple[np.ndarray, np.ndarray]:
    """8 samples, of which 4 have no number as their target."""
    inputs, targets = (part[:8].copy() for part in faulty())
    targets[4:] = np.nan
    return inputs, targets


@pytest.mark.usefixtures("reference")
def test_half_of_a_batch_is_no_outlier(tmp_path: Path) -> None:
    """The loss is not a number, and `on_nan` says what happens."""
    with pytest.raises(isotrain.IsotrainError, match=r"NaN|nan"):
        isotrain.run(
            spec(**{**FAULTY, **DROPPED, "data": half_faulty}),
            backend="reference",
            replicas=2,
            output=tmp_path / "run",
            on_event=lambda event: None,
        )


@pytest.mark.parametrize(
    "fields", [{"shares": "by-speed"}, {"drop_outliers": 10.0}, {"verify_every": 10}]
)
def test_they_need_parts(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"reproducible with {next(iter(fields))}"):
        isotrain.TrainingSpec(**spec(**fields))


def batches_of_arrays() -> isotrain.DataSet:
    return isotrain.DataSet(
        isotrain.sources.stream(lambda: iter([(np.ones((4, 3)), np.ones((4, 1)))]))
    )


@pytest.mark.usefixtures("reference")
@pytest.mark.parametrize("fields", [{"shares": "by-speed"}, {"verify_every": 10}])
def test_streams_are_not_cut_anew(fields: dict[str, Any], tmp_path: Path) -> None:
    expected = f"{next(iter(fields))}: the training data are a stream"
    with pytest.raises(isotrain.IsotrainError, match=expected):
        isotrain.run(
            spec(**fields, reproducible="bits", data=batches_of_arrays),
            backend="reference",
            replicas=2,
            output=tmp_path / "run",
            on_event=lambda event: None,
        )
