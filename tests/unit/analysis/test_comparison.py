"""What a comparison makes of its runs: summaries, order of runs, verdict, changes, records."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.analysis.comparison_cells import cell, comparison, repeat

from isotrain.analysis.compare import store, summary, text
from isotrain.analysis.compare.measurement.grid import RunOrder
from isotrain.analysis.compare.records import (
    Cell,
    Change,
    Span,
    Verdict,
)
from isotrain.analysis.compare.result import from_dict, read_comparison
from isotrain.analysis.compare.summary import RunTimes, repeat_of, summarize
from isotrain.analysis.compare.verdict import decide
from isotrain.core.errors import IsotrainError


def rank(seconds: list[float], at: float, **fields: Any) -> dict[str, Any]:
    """What one process returns that timed blocks of 2 steps, 10 samples each."""
    count = len(seconds)
    return {
        "first_step_at": at,
        "opening_s": 7.0,
        "opening_steps": 5,
        "warm_up": {"steps": [1, 1], "samples": [10, 10], "seconds": [2.0, 1.0], "cpu_s": [0, 0]},
        "blocks": {
            "steps": [2] * count,
            "samples": [20] * count,
            "seconds": seconds,
            "cpu_s": [0.25] * count,
        },
        "steady_state_start": 1,
        "block_steps": 2,
        "peak_memory_bytes": int(at),
        "all_reduce_s": 0.125,
        **fields,
    }


def test_a_repeat_combines_its_processes() -> None:
    raw = {"started": 100.0, "ranks": [rank([4, 1, 2], 103.0), rank([3, 2, 1], 104.0)]}
    found = repeat_of(raw, RunTimes(3, 50.0, 12.0))
    assert found.block_seconds == [2, 2]  # of the slowest, from the first steady one on
    assert found.block_samples == [20, 20]
    assert found.cpu_s == 1.0
    assert found.first_step_s == 4.0
    assert found.peak_memory_bytes == [103, 104]
    assert found.warm_up_steps == 5 + 2 + 2
    assert found.compile_s == 7 + 3 + 4 - 9 * 1.0
    assert found.steady


def test_a_run_without_a_steady_state_is_noted() -> None:
    raw = {"started": 0.0, "ranks": [rank([4, 3, 2, 1], 1.0, steady_state_start=None)]}
    found = repeat_of(raw, RunTimes(0, 0.0, 1.0))
    assert not found.steady
    assert found.block_seconds == [2, 1]
    shaky = replace(cell("a@1", 100, 100, 100), repeats=[found] * 3)
    assert "3 of 3 runs did not become steady" in summarize([shaky], None, 0)[0].notes[0]


def test_a_time_line_shows_idle_time_of_stages() -> None:
    """Two stages and three micro-batches are predicted to wait (2 - 1) / (3 + 2 - 1) of the time."""
    first, second = [("forward", 0.5)] * 3, [("wait", 1.0), *[("forward", 0.5)] * 3]
    spans = [Span(f"rank {stage}", "input", 0.0, 2.0) for stage in range(2)]
    spans += row("rank 0", 2.0, [*first, ("send", 0.25), ("wait", 0.75), ("backward", 1.5)])
    spans += row("rank 1", 2.0, [*second, ("backward", 1.0), ("update", 0.5)])
    pipeline_cell = cell("a@1", 100, 100, 100, timeline=spans)
    (told,) = summarize([pipeline_cell], None, 0)[0].notes
    assert "compute no pass for 31% of the time" in told
    assert "predicts 25%" in told
    plain = replace(pipeline_cell, timeline=[Span("rank 0", "step", 0.0, 4.0)])
    assert not summarize([plain], None, 0)[0].notes


def row(track: str, start: float, phases: list[tuple[str, float]]) -> list[Span]:
    """Spans that follow each other."""
    found = []
    for name, seconds in phases:
        found.append(Span(track, name, start, seconds))
        start += seconds
    return found


def test_cells_are_related_to_one_replica_and_to_the_reference() -> None:
    cells = [
        cell("a@1", 100, 101, 102),
        cell("a@2", 150, 151, 152, losses=[1.0, 0.6]),
        cell("b@2", 400, 401, 402),
        cell("c@1", losses=[], status="failed", reason="broken"),
    ]
    one, two, alone, failed = summarize(cells, "a@1", 0)
    assert one.speedup is not None
    assert one.speedup.value == 1.0
    assert two.speedup is not None
    assert two.efficiency is not None
    assert two.speedup.value == pytest.approx(1.5, rel=0.02)
    assert two.efficiency.value == pytest.approx(0.75, rel=0.02)
    assert alone.speedup is None
    assert two.loss_difference == pytest.approx(0.1 / 0.6)
    assert two.plan_differences == [("replicas", 1, 2)]
    assert two.total_memory_bytes is not None
    assert two.total_memory_bytes.value == 300
    assert two.memory_per_replica is not None
    assert two.memory_per_replica.value == 150
    assert two.bus_bandwidth is not None
    assert two.bus_bandwidth.value == 2000
    assert two.cpu_s_per_sample is not None
    assert two.cpu_s_per_sample.value == 0.01
    assert failed.samples_per_s is None


def test_a_cell_that_fails_later_keeps_its_runs_and_loses_its_figures() -> None:
    (done,) = summarize([cell("a@1", 1.0)], "a@1", 0)
    assert done.samples_per_s is not None
    (failed,) = summarize([replace(done, status="failed", reason="crash")], "a@1", 0)
    assert failed == cell("a@1", 1.0, status="failed", reason="crash")


def test_nan_losses_differ_from_numbers() -> None:
    fine, broken = cell("a@1", 1.0), cell("b@1", 1.0, losses=[1.0, math.nan])
    assert summarize([fine, broken], "a@1", 0)[1].loss_difference == math.inf
    assert summarize([broken, broken], "b@1", 0)[1].loss_difference == 0.0


def decided(*cells: Cell) -> Verdict:
    return decide(summarize(cells, None, 0))


def test_a_clear_winner_is_picked() -> None:
    found = decided(cell("a@1", 100, 101, 102), cell("b@1", 200, 201, 202), cell("c@1"))
    assert (found.pick, found.tied) == ("b@1", [])
    assert "1.99 times a@1" in found.reason


def test_overlapping_intervals_are_a_tie() -> None:
    rows = cell("a@1", 100, 110, 120), cell("b@1", 105, 112, 119), cell("c@1", 10, 10, 10)
    found = decided(*rows)
    assert found.pick is None
    assert sorted(found.tied) == ["a@1", "b@1"]
    assert "Cannot tell" in found.reason


def test_few_runs_give_no_verdict() -> None:
    found = decided(cell("a@1", 100, 100), cell("b@1", 300, 300))
    assert found.pick is None
    assert found.tied == ["b@1", "a@1"]


def test_without_figures_there_is_no_verdict() -> None:
    assert decided(cell("a@1")).pick is None


def test_a_winner_with_other_losses_is_warned_about() -> None:
    rows = cell("a@1", 9, 9, 9), cell("b@1", 90, 90, 90, losses=[1.0, 0.4])
    assert "20.0%" in decide(summarize(rows, "a@1", 0)).reason


def order_of(agenda: RunOrder, names: list[str]) -> list[str]:
    """The runs that the agenda asks for, each at 10 s."""
    cells = {name: cell(f"{name}@1") for name in names}
    made: list[str] = []
    while (name := agenda.next_cell(list(cells.values()), [], 10.0 * len(made))) is not None:
        key = name.partition("@")[0]
        made.append(key)
        runs = [*cells[key].repeats, repeat(1.0)]
        cells[key] = replace(cells[key], repeats=runs, status="finished")
    return made


def test_runs_are_interleaved_in_an_order_that_the_seed_draws() -> None:
    names = list("abcde")
    made = order_of(RunOrder(4, seed=1), names)
    rounds = [made[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(one) == names for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert made == order_of(RunOrder(4, seed=1), names)
    assert made != order_of(RunOrder(4, seed=2), names)


def test_a_failed_cell_is_not_run_again() -> None:
    cells = [cell("a@1", status="failed"), cell("b@1", 1.0)]
    assert RunOrder(2, 0).next_cell(cells, [], 0.0) == "b@1"
    assert RunOrder(1, 0).next_cell(cells, [], 0.0) is None


def test_the_budget_goes_where_the_ranking_is_open() -> None:
    cells = [cell("a@1", 1, 1, 1), cell("b@1", 1, 1), cell("c@1", 1, 1)]
    agenda = RunOrder(2, 0, time_budget=100.0)
    assert agenda.next_cell(cells, ["a@1", "b@1"], 70.0) == "b@1"
    assert agenda.next_cell(cells, [], 70.0) is None  # nothing is open
    assert agenda.next_cell(cells, ["a@1", "b@1"], 95.0) is None  # a run takes 10 s
    assert RunOrder(2, 0).next_cell(cells, ["a@1", "b@1"], 0.0) is None  # no budget, no more runs


def test_the_budget_ends_the_first_rounds_too() -> None:
    assert len(order_of(RunOrder(3, 0, time_budget=35.0), list("abcde"))) == 4


def test_changes_since_an_earlier_comparison() -> None:
    old = comparison(cell("a@1", 100, 101, 102), cell("b@1", 100, 101, 102), cell("gone@1", 1.0))
    now = comparison(cell("a@1", 80, 81, 82), cell("b@1", 99, 101, 103), cell("new@1", 1.0))

    def since(margin: float) -> list[Change]:
        return summary.changes_since(old, now, margin=margin, seed=0)

    slower, same, new, gone = since(0.05)
    assert slower.slower
    assert slower.samples_per_s is not None
    assert slower.samples_per_s.value == pytest.approx(0.8, abs=0.02)
    assert slower.loss_difference == 0.0
    assert not same.slower
    assert slower.note is None
    assert (new.note, gone.note) == ("not measured then", "not measured now")
    assert not any(c.slower for c in since(0.3))


def test_a_change_within_the_noise_is_not_slower() -> None:
    old, now = comparison(cell("a@1", 99, 100, 101)), comparison(cell("a@1", 70, 90, 105))
    (found,) = summary.changes_since(old, now, margin=0.0, seed=0)
    assert found.samples_per_s is not None
    assert found.samples_per_s.value < 0.95
    assert not found.slower


def test_changes_note_other_settings() -> None:
    old = comparison(cell("a@1", 100, 101, 102))
    now = replace(old, machine={"cores": 8}, spec={"seed": 1})
    (found,) = summary.changes_since(old, now, margin=0.0, seed=0)
    assert found.samples_per_s is not None
    assert found.note == "another machine then; another spec then"
    assert "another machine then" in text.result(replace(now, changes=[found]))


def test_records_survive_their_file(tmp_path: Path) -> None:
    full = cell("a@2", 1.0, 2.0, losses=[1.0, math.inf], timeline=[Span("rank 0", "step", 0, 1)])
    made = comparison(full, cell("b@2"))
    made = replace(made, changes=summary.changes_since(made, made, margin=0, seed=0))
    store.write(made, tmp_path)
    assert read_comparison(tmp_path) == from_dict(made.to_dict()) == made
    assert "a@2" in made._repr_html_()
    assert "<" not in text.result(made)


def test_to_pandas_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(IsotrainError, match="pip install pandas"):
        comparison(cell("a@1", 1.0)).to_pandas()


def test_rows_have_the_same_columns() -> None:
    made = comparison(cell("a@1", 1.0, metrics={"accuracy": 0.5}), cell("b@1"))
    lines = made.to_csv().splitlines()
    assert len(lines) == 3
    assert Counter(line.count(",") for line in lines) == {lines[0].count(","): 3}
    assert "samples_per_s,samples_per_s_low,samples_per_s_high" in lines[0]
    assert "metric_accuracy" in lines[0]
