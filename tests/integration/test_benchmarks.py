"""The programs that measure isotrain beside others: they run, and believe no contender unseen."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.in_process import script

from benchmarks import batches, checkpoints, elastic_kills, kills, restarts, shares, stall, steps
from benchmarks.data import __main__ as loading
from benchmarks.data import contenders as loading_contenders
from benchmarks.peers import __main__ as program
from benchmarks.peers import goals, table
from benchmarks.peers.contenders import CONTENDERS, Command, Contender
from benchmarks.peers.rounds import measure, see_that_losses_agree
from benchmarks.peers.run import Cell, ContenderError, Measured
from benchmarks.peers.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
WAYS = ["torch.save", "distributed.checkpoint, async", "Keras save_weights"]
"""To save. The one that is not asynchronous loads as this; isotrain's is tried in programs of its own."""
PLANTED = """
import os
from benchmarks.peers.job import Clock, Job
job = Job.of_this_process()
clock = Clock(job)
for step in range(job.work.steps):
    clock.step_done(float(os.environ["LOSS"]) / (step + 1))
clock.write(0)
"""


def cell(name: str, program: str, loss: float = 2.0) -> Cell:
    """A contender of one process that runs a program, and says that its losses are such."""
    command = Command((sys.executable, "-c", program), {"LOSS": str(loss)})
    return Cell(Contender(name, name, name, lambda *_: [command]), "mlp-64", 1, 1)


@pytest.mark.parametrize("name", ["long_run", "recompute", "same_bits"])
def test_programs_have_help(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = script(ROOT / "benchmarks" / f"{name}.py", "--help", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: ")


@pytest.mark.slow
def test_contenders_with_the_same_losses_are_measured() -> None:
    cells = [cell(name, PLANTED) for name in ("one", "another")]
    told: list[str] = []
    first, timed = measure(cells, rounds=2, seed=0, tell=told.append)
    assert [len(timed[each]) for each in cells] == [2, 2]
    assert len(told) == 6
    for each in cells:
        assert first[each][0].memory > 0
        assert all(run.step > 0 and run.first_step > 0 for run in timed[each])


@pytest.mark.slow
def test_an_interrupt_leaves_the_rounds_that_are_whole() -> None:
    cells = [cell(name, PLANTED) for name in ("one", "another")]

    def until(label: str) -> Callable[[str], None]:
        def tell(line: str) -> None:
            if line.startswith(label):
                raise KeyboardInterrupt

        return tell

    first, timed = measure(cells, rounds=3, seed=0, tell=until("2/3"))
    assert [(len(first[each]), len(timed[each])) for each in cells] == [(1, 1), (1, 1)]
    with pytest.raises(KeyboardInterrupt):
        measure(cells, rounds=1, seed=0, tell=until("1/1"))


def test_a_contender_with_another_loss_is_refused() -> None:
    cells = [cell("one", PLANTED), cell("another", PLANTED), cell("astray", PLANTED, 2.01)]
    with pytest.raises(ContenderError, match=r"got\nastray, mlp-64, 1 x 1"):
        measure(cells, rounds=1, seed=0, tell=lambda _: None)


def test_losses_are_compared_until_rounding_has_grown() -> None:
    def see(workload: str, *losses: tuple[float, float]) -> None:
        cells = [dataclasses.replace(cell(str(each), ""), workload=workload) for each in losses]
        see_that_losses_agree(
            {each: [Measured(1.0, 1.0, 0.0, own)] for each, own in zip(cells, losses, strict=True)}
        )

    see("resnet-50", (7.0, 5.0), (7.0, 5.0), (7.001, 6.0))
    with pytest.raises(
        ContenderError, match=r"to be 7\.000000 \(each within 0\.005\), got\n.*: 7.1"
    ):
        see("resnet-50", (7.0, 5.0), (7.0, 5.0), (7.1, 5.0))
    with pytest.raises(ContenderError, match=r"7\.001000, then 6\.000000$"):
        see("mlp-64", (7.0, 5.0), (7.0, 5.0), (7.001, 6.0))


def test_local_batch_normalisation_is_compared_at_equal_replica_counts() -> None:
    def see(workload: str) -> None:
        cells = {
            dataclasses.replace(cell(name, ""), workload=workload, replicas=replicas): losses
            for name in ("one", "another")
            for replicas, losses in ((1, (7.0, 7.0)), (2, (7.5, 7.5)))
        }
        see_that_losses_agree(
            {each: [Measured(1.0, 1.0, 0.0, losses)] for each, losses in cells.items()}
        )

    see("resnet-50")
    with pytest.raises(ContenderError, match="cnn: expected"):
        see("cnn")


def test_dealing_samplers_give_each_replica_its_samples() -> None:
    work = WORKLOADS["cnn"]
    dealt = work.dealt(1, 2)
    for rank in range(2):
        by_hand = list(work.local_batches(rank, 2))[work.steps_per_epoch : 2 * work.steps_per_epoch]
        assert dealt[rank::2].tolist() == np.concatenate(by_hand).tolist()


def test_a_contender_that_fails_is_named_with_what_it_said() -> None:
    cells = [cell("one", PLANTED), cell("broken", "raise SystemExit('out of luck')")]
    with pytest.raises(ContenderError, match=r"(?s)broken, mlp-64.*out of luck"):
        measure(cells, rounds=1, seed=0, tell=lambda _: None)


@pytest.mark.slow
def test_compared_runs_are_interleaved() -> None:
    cells = [
        dataclasses.replace(cell(name, PLANTED), replicas=replicas)
        for name in ("one", "two", "three", "four")
        for replicas in (1, 2, 3)
    ]
    told: list[str] = []
    measure(cells, rounds=1, seed=0, tell=told.append)
    names = [re.fullmatch(r"\d/1 (\w+), mlp-64, (\d) x 1: .*", line) for line in told]
    ran = [(match[2], match[1]) for match in names if match]
    assert sorted(ran) == sorted(2 * [(str(each.replicas), each.contender.name) for each in cells])
    parts = [ran[start : start + 4] for start in range(0, len(ran), 4)]
    assert all(len({replicas for replicas, _ in part}) == 1 for part in parts)
    assert len({tuple(name for _, name in part) for part in parts}) > 1


ODD = """
import os, pathlib
count = pathlib.Path(os.environ["COUNT"])
count.write_text(count.read_text() + ".")
if len(count.read_text()) == 2:
    raise SystemExit("this once")
"""


def test_a_contender_that_ends_badly_once_is_run_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.write_text("")
    command = Command((sys.executable, "-c", ODD + PLANTED), {"LOSS": "2", "COUNT": str(count)})
    odd = Cell(Contender("odd", "odd", "odd", lambda *_: [command]), "mlp-64", 1, 1)
    told: list[str] = []
    _, timed = measure([odd], rounds=2, seed=0, tell=told.append)
    assert len(timed[odd]) == 2
    assert [line for line in told if line.startswith("again: odd, mlp-64")]


def test_ratios_are_taken_within_a_round() -> None:
    """Ratios are to the loop by hand, of portable models to native ones, and to the fastest of the peers."""
    steps = {
        "torch-ddp": [1.0, 10.0, 2.0],
        "fabric": [2.0, 20.0, 4.0],
        "ignite": [3.0, 15.0, 6.0],
        "isotrain/torch-ddp/native": [1.5, 15.0, 3.0],
        "isotrain/torch-ddp/portable": [3.0, 30.0, 6.0],
        "horovod-torch": [1.0, 1.0, 1.0],
    }
    rows = table_rows(steps)
    found = [[r.ratio, r.to_native, r.to_peer] for r in rows]
    assert [[e and (e.value, e.low, e.high) for e in own] for own in found] == [
        [None, None, None],
        [(2.0, 2.0, 2.0), None, None],
        [(3.0, 1.5, 3.0), None, None],
        [(1.5, 1.5, 1.5), None, (0.75, 0.75, 0.75)],
        [(3.0, 3.0, 3.0), (2.0, 2.0, 2.0), (1.5, 1.5, 1.5)],
        [None, None, None],
    ]
    text = table.markdown(rows, {"cores": "2"})
    assert "### mlp-64, 1 replica with 1 thread each" in text
    assert "| isotrain/torch-ddp/portable | 6000.000 [3000.000, 30000.000] | 3.000" in text
    assert rows[4].record()["ratio_to_native"]["value"] == 2.0
    lines = table.condensed(rows).splitlines()
    assert [line.split(" | ")[2:6] for line in lines[2:]] == [
        ["1 x 1", "2000.00 [1000.00, 10000.00]", "1.50 [1.50, 1.50]", "0.75 [0.75, 0.75]"]
    ]


def table_rows(
    steps: Mapping[str, list[float]], workload: str = "mlp-64", threads: Iterable[int] = (1,)
) -> list[table.Row]:
    """Rows of contenders with such step times, multiplied by the number of threads."""
    known = {contender.name: contender for contender in CONTENDERS}
    timed = {
        Cell(known[name], workload, 1, number): [
            Measured(number * step, 5.0 + step, 0.0, (1.0, 1.0)) for step in found
        ]
        for number in threads
        for name, found in steps.items()
    }
    return table.rows({each: [Measured(1.0, 1.0, 100.0, (1.0, 1.0))] for each in timed}, timed)


def test_numbers_of_threads_are_compared_by_themselves() -> None:
    rows = table_rows(
        {"torch-ddp": [1.0], "isotrain/torch-ddp/native": [1.5]}, "resnet-50", threads=(1, 2)
    )
    ours = [row for row in rows if row.ratio is not None]
    assert [
        (row.cell.threads, row.step_ms.value, row.ratio.value) for row in ours if row.ratio
    ] == [(1, 1500.0, 1.5), (2, 3000.0, 1.5)]
    text = table.markdown(rows, {})
    assert "1 replica with 2 threads each\n\nLosses were compared over the first 4 of 16" in text


def test_goals_are_reached_missed_or_open() -> None:
    rows = table_rows(
        {
            "torch-ddp": [4e-4, 4e-4, 4e-4],
            "isotrain/torch-ddp/native": [4.1e-4, 4.15e-4, 5e-4],
            "isotrain/torch-ddp/portable": [8e-4, 8e-4, 8e-4],
        }
    )
    lines = {line.split(" | ")[0]: line.split(" | ") for line in goals.summary(rows).splitlines()}
    place = "mlp-64, 1 x 1"
    native = "| native, at most 1.02 times by hand, or 20 µs more below 1 ms"
    assert lines[native][1:] == ["1", "", " |"]
    portable = "| portable on torch, at most 1.05 times native (mlp-64: 1.3)"
    assert lines[portable][1] == "0"
    assert (
        lines[portable][3]
        == f"isotrain/torch-ddp/portable, {place}: 1.93 [1.60, 1.95], to be 1.30 |"
    )
    slower = table_rows(
        {"torch-ddp": [1e-2] * 3, "isotrain/torch-ddp/native": [1e-2, 1.04e-2, 1.05e-2]}
    )
    assert f"| 0 | isotrain/torch-ddp/native, {place}: 1.04 [1.00, 1.05], to be 1.02 |  |" in (
        goals.summary(slower)
    )


def test_the_goals_choose_their_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Cell] = []
    monkeypatch.setattr(program, "measure", lambda cells, *_: (chosen.extend(cells), {})[::-1])
    monkeypatch.setattr(program.environment, "require", lambda: None)
    monkeypatch.setattr(sys, "argv", ["benchmarks.peers", "--goals", "--rounds", "0"])
    assert program.main() == 0
    found: dict[str, set[tuple[int, int]]] = {}
    for each in chosen:
        found.setdefault(each.contender.name, set()).add((each.replicas, each.threads))
    assert found["isotrain/torch-ddp/portable"] == {(1, 1), (1, 2), (2, 1)}
    assert found["isotrain/tf-mirrored/native"] == {(1, 1), (2, 1)}
    assert found["horovod-tf"] == {(2, 1)}
    assert "torch-ddp/loader" not in found


@pytest.mark.examples
def test_smallest_selection_trains() -> None:
    """Both sides train: the loop by hand, and isotrain."""
    command = [sys.executable, "-m", "benchmarks.peers", "--workload", "mlp-64", "--replicas", "1"]
    command += ["--threads", "1", "--contender", "torch-ddp"]
    command += ["--contender", "isotrain/torch-ddp/native"]
    done = subprocess.run(
        [*command, "--rounds", "0"], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "All 2 train the same.\n"


def test_loading_is_compared_with_the_fastest_of_the_same_replicas() -> None:
    rates = {"torch by hand": 100.0, "accelerate": 125.0, "fabric": 50.0, "isotrain/torch-ddp": 124}
    by_name = {each.name: each for each in loading_contenders.CONTENDERS}
    runs = {
        loading.Cell(by_name[name], "texts", replicas): [loading.Measured(rate * replicas, 1.0, 0)]
        for replicas in (1, 2)
        for name, rate in rates.items()
    }
    assert loading.table(runs).count("0.99 [0.99, 0.99] of accelerate") == 2
    goal = "| texts, 2 x isotrain/torch-ddp, samples per second to accelerate: at least 0.98 |"
    assert f"{goal} 0.99 [0.99, 0.99] | yes |" in loading.goals(runs, [])


@pytest.mark.exhaustive
@pytest.mark.examples
def test_samples_are_loaded_by_hand_and_by_isotrain() -> None:
    command = [sys.executable, "-m", "benchmarks.data", "--workload", "texts", "--replicas", "1"]
    command += ["--scale", "0.005", "--epochs", "3", "--rounds", "1", "--workers", "1", "--goals"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| texts | 1")]
    rows = [line.split(" | ") for line in lines]
    rows = [
        row for row in rows if row[2] not in ("accelerate", "fabric")
    ]  # where they are installed
    names = ["torch by hand", "torch by hand, no steps"]
    names += [f"isotrain/torch-ddp{each}" for each in ("", ", by-length", ", no steps")]
    assert [row[2] for row in rows] == names
    assert [bool(row[4]) for row in rows] == [False, False, True, True, False]
    assert all(float(row[column].split()[0]) > 0 for row in rows for column in (3, 5))
    assert "| texts, 1 x isotrain/torch-ddp, by-length, samples per second to" in done.stdout


def test_a_table_and_its_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("torch-ddp", "isotrain/torch-ddp/native")
    planted = [cell(name, PLANTED).contender for name in names]
    known = [dataclasses.replace(each, reference="torch-ddp") for each in planted]
    monkeypatch.setattr(program, "CONTENDERS", known)
    asked = ["--workload", "mlp-64", "--replicas", "1", "--contender", "*torch-ddp*"]
    asked += ["--rounds", "1", "--json", f"{tmp_path}/rows", "--markdown", f"{tmp_path}/md"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.peers", *asked])
    assert program.main() == 0
    by_hand, ours = json.loads((tmp_path / "rows").read_text())["rows"]
    assert by_hand["ratio"] is None
    assert ours["ratio"]["value"] == pytest.approx(
        ours["step_ms"]["value"] / by_hand["step_ms"]["value"]
    )
    text = (tmp_path / "md").read_text()
    assert text in capsys.readouterr().out
    assert "### mlp-64, 1 replica" in text
    assert "| isotrain/torch-ddp/native |" in text


@pytest.mark.examples
def test_exchange_benchmark_runs(tmp_path: Path) -> None:
    asked = ("--weights", "3", "--width", "64", "--pairs", "2")
    done = script(ROOT / "benchmarks" / "exchange.py", *asked, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 weights of 0.02 MiB, 2 replicas: TensorFlow's own" in done.stdout


@pytest.fixture(scope="module")
def trying() -> Iterator[Executor]:
    """Does what it is given in new processes, forked from one that has imported what the ways need."""
    programs = multiprocessing.get_context("forkserver")
    programs.set_forkserver_preload(
        ["isotrain.adapters.keras.lazy_import", "keras", "torch.distributed.checkpoint"]
    )
    with (
        mock.patch.dict(os.environ, {"KERAS_BACKEND": "torch"}),
        ProcessPoolExecutor(1, programs, max_tasks_per_child=1) as trying,
    ):
        yield trying


@pytest.mark.examples
@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_save_loads_what_it_saved(name: str, tmp_path: Path, trying: Executor) -> None:
    """Loading compares the weights."""
    found: dict[str, float] = {}
    for part in (checkpoints.measure_saving, checkpoints.measure_loading):
        found |= trying.submit(part, checkpoints.CONTENDERS[name](), 1, tmp_path).result()
    require_figures(found)


def require_figures(found: Mapping[str, float]) -> None:
    """Checks that all figures are there; loading has compared the weights."""
    assert found.keys() == set(checkpoints.FIGURES)
    assert 0 < found["stall"] <= found["on disk"]


@pytest.mark.examples
@pytest.mark.parametrize("name", ["isotrain", "by hand, torch.save"])
def test_training_goes_on_beside_what_is_saved(name: str, trying: Executor) -> None:
    """The first save is not counted, nor how much longer its steps took."""
    work = stall.Work(every=2, saves=1, samples=1, width=8)
    found = trying.submit(stall.timed, name, work).result()
    assert [len(found[column]) for column in stall.COLUMNS] == [1, 2, 2, 1, 1]
    assert min(found["step"] + found["saving"]) > 0


@pytest.mark.examples
def test_saving_and_loading_are_programs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ['PYTHONPATH']}")
    require_figures(checkpoints.measure("isotrain", 1))


@pytest.mark.examples
def test_kill_drill_and_restart_times() -> None:
    """A run is killed at a random moment, and another once a checkpoint exists."""
    strategy = {"name": "local-sgd", "options": {"every": 4}}
    done = kills.drill("reference", 1, steps=100, seed=0, strategy=strategy, background=False)
    assert done.most == 10
    assert not list(done.faults())
    start, again = restarts.timed("reference", victim=1)
    assert min(start, again) > 0


@pytest.mark.examples
def test_a_disturbed_elastic_run_is_equal_to_the_bit() -> None:
    done = elastic_kills.disturb("reference", 2, steps=300, seed=0, seconds=0.3, bits=True)
    assert not list(done.faults(0.0))
    assert done.steps == (600, 600)
    assert 1 <= done.disturber.made <= 2
    assert "equal (difference 0)" in done.summary(0.0)


@pytest.mark.exhaustive
@pytest.mark.examples
def test_shares_by_speed_give_the_slow_replica_fewer_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It takes 20 times as long for a part, by a sleep that is longer than all else of a step."""
    asked = ["benchmarks.shares", "--rounds", "1", "--steps", "3", "--parts", "8", "--slow", "20"]
    monkeypatch.setattr(sys, "argv", asked)
    shares.main()
    *_, row = capsys.readouterr().out.splitlines()
    backend, _, _, equal, dealt, *_, bits = row.strip("| ").split(" | ")
    assert (backend, equal, bits) == ("torch-ddp", "[4, 4]", "0")
    fast, slow = json.loads(dealt)
    assert fast > slow
    assert fast + slow == 8


@pytest.mark.examples
def test_batches_benchmark_prints_both_sides(
    trying: Executor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(name: str, side: str) -> float:
        return trying.submit(batches.SIDES[side], batches.KINDS[name]).result()

    monkeypatch.setattr(batches, "measured", measured)
    asked = ["batches", "arrays, shuffled", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", asked)
    batches.main()
    expected = r"arrays, shuffled: by hand .* µs, by a session .* µs\n"
    assert re.fullmatch(expected, capsys.readouterr().out)


@pytest.mark.examples
def test_parts_of_a_step_take_time(
    trying: Executor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part takes time, which it would not if its moments were in another order."""

    def measured(side: str, given: Any) -> list[float]:
        job = ("mlp-64", 1, "wall")
        if side == "by hand":
            parts = trying.submit(steps.by_hand, *job).result()
        else:
            parts = steps.SIDES[side](*job)
        assert len(parts) == len(steps.PARTS)
        known = [part for part in parts if not math.isnan(part)]
        assert len(known) == (4 if side == "portable" else len(parts))
        assert min(known) > 0
        return parts

    monkeypatch.setattr(steps, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["steps", "--rounds", "1"])
    steps.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[-8:]] == list(steps.PARTS)


@pytest.mark.examples
def test_what_watching_costs_is_measured_on_what_real_ranks_have_said() -> None:
    command = [sys.executable, "-m", "benchmarks.watching", "--ranks", "8", "--seconds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks, share, _, _, _, _, heard, _ = done.stdout.splitlines()[1].split()
    assert ranks == "8"
    assert float(share.rstrip("%")) > 0
    assert int(heard) > 0  # bytes of each rank in a second
