"""The parts of the conformance kit that need no run."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isotrain.core.cli.exit_codes import ExitCode
from isotrain.core.cli.main import main
from isotrain.core.contracts.backend.capabilities import Capabilities, Capability
from isotrain.core.contracts.backend.group_protocols import (
    GROUP_PROTOCOLS,
    FullyShardedGroup,
    PipelineGroup,
)
from isotrain.core.contracts.backend.protocol_checks import methods_of
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import IsotrainError, PlanError
from isotrain.core.plugins.manager import plugin_manager
from isotrain.testing import backend, commands, digits, strategy
from isotrain.testing.checks import crashes as crash_checks
from isotrain.testing.launching import DEVICE_VARIABLE, Run, on_device
from isotrain.testing.native_equality import assert_native_equality
from isotrain.testing.recording_group import NEEDS, REPLICA_NEEDS, RecordingGroup
from isotrain.testing.scorecard import Check, Scorecard

WITHOUT_CAPABILITY = {
    *("to_device", "is_on_device", "tensor", "numpy", "barrier", "synchronize_device", "close"),
    *(
        "pass_costs",
        "evaluation_step",
        "export",
        "read_weights_file",
        "compress",
        "keep_gradients",
        "kept_gradients",
        "keep_gradient_norms",
        "gradient_norms",
        "set_frozen",
        "start_profile",
        "copy_averaged",
        "update_averages",
        "savepoint",
        "snapshot_scalar",
        "needs_closure",
        "objective_communicates",
        "predict",
        "collect_metrics",
        "traits",
        "plan_notes",
        "momentum_setter",
        "set_group_rates",
        "optimizer_lr_schedule",
        "optimizer_rates",
        "weight_finalizer",
        "refuses_single_sample",
        "step_notes",
        "last_actions",
        "set_action_timing",
        "pop_metric_state",
        "add_metric_state",
    ),
    *(
        "preserving_training_state",
        "preserving_state",
        "replica_weights",
        "describe_state",
        "all_reduce_max",
    ),
    *("not_checkpointed", "local_index", "is_remote", "reshard_weights"),
}


def sums() -> None:
    """Sums are sums."""


CHECK = Check(sums)
FAILED = CHECK.failed("2 + 2\n= 5")


def test_every_method_of_a_group_has_a_capability_or_is_required() -> None:
    methods = {name for name in dir(ReplicaGroup) if callable(getattr(ReplicaGroup, name))}
    public = {name for name in methods if not name.startswith("_")}
    public.update(*map(methods_of, GROUP_PROTOCOLS))
    assert public == {*NEEDS, *WITHOUT_CAPABILITY}
    used = {*NEEDS.values(), *REPLICA_NEEDS.values(), Capability.BFLOAT16_COLLECTIVES}
    others = {Capability.HYBRID_SHARDING, Capability.ASYNCHRONOUS_COLLECTIVES}
    assert used | others == set(Capability), "those are no method's"


def test_a_watched_group_notes_used_capabilities() -> None:
    class Group:
        replicas = 2

        def all_reduce(self, values: list[int], op: str) -> list[int]:
            return [value * 2 for value in values]

    used: set[Capability] = set()
    watched: Any = RecordingGroup(Group(), used)  # type: ignore[arg-type]
    assert watched.replicas == 2
    assert not used
    assert watched.all_reduce([3], "sum") == [6]
    assert used == {Capability.COMPUTE}


def test_a_watched_group_has_the_protocols_of_its_group() -> None:
    class Stages:
        def pipeline_step(self) -> None: ...

        gather_stages = profile_layers = pipeline_step

    used: set[Capability] = set()
    watched: Any = RecordingGroup(Stages(), used)  # type: ignore[arg-type]
    assert isinstance(watched, PipelineGroup)
    assert not isinstance(watched, FullyShardedGroup)
    assert not used


def test_the_gradients_of_the_digits_are_those_of_their_loss() -> None:
    generator, rows = np.random.default_rng(3), np.arange(5)
    shapes = {
        "hidden/kernel": (64, digits.HIDDEN),
        "hidden/bias": (digits.HIDDEN,),
        "head/kernel": (digits.HIDDEN, 10),
        "head/bias": (10,),
    }
    oracle = digits.Oracle({n: generator.normal(size=s) / 4 for n, s in shapes.items()})
    gradients = oracle.gradients(rows)
    for name, shape in shapes.items():
        direction = generator.normal(size=shape)
        before = oracle.weights[name]
        ends = []
        for sign in (1, -1):
            oracle.weights[name] = before + sign * 1e-6 * direction
            ends.append(oracle.loss(rows))
        oracle.weights[name] = before
        slope = (ends[0] - ends[1]) / 2e-6
        assert slope == pytest.approx(float((gradients[name] * direction).sum()), rel=1e-6)


@pytest.mark.slow
def test_a_missing_scikit_learn_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for ask in (digits.require, digits.images.__wrapped__):
        with pytest.raises(IsotrainError, match=r"pip install 'isotrain\[testing\]'"):
            ask()


@pytest.mark.slow
def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    found, classes = digits.images()
    assert np.array_equal(found * 16, inputs)
    assert np.array_equal(classes, labels)


def test_names_of_checks_are_unique() -> None:
    for checks in (backend.CHECKS, strategy.CHECKS):
        assert len({check.name for check in checks}) == len(checks)


def outcomes_of(notes: dict[int, dict[str, Any]], failure: str | None) -> dict[str, Any]:
    adapter = plugin_manager().backend("torch-ddp")
    run = Run([], notes, failure, 0.0, 0.0, Path())
    return {o.check: o for o in backend.run_outcomes(adapter, run, processes=2)}


def test_checks_after_one_that_ends_the_run_are_not_run() -> None:
    names = [check.name for check in backend.IN_SESSION]
    done = dict.fromkeys(names[:3], "")
    found = outcomes_of({0: {**done, names[3]: ""}, 1: done}, "rank 1 died")
    assert [found[name].verdict for name in names[:5]] == [
        *("passed", "passed", "passed", "failed", "skipped")
    ]
    assert "rank 1 died" in found[names[3]].reason
    assert found["clean_exit"].verdict == "skipped"


def test_a_process_without_results_is_a_failure() -> None:
    names = [check.name for check in backend.IN_SESSION]
    found = outcomes_of({0: dict.fromkeys(names, "")}, "rank 1 never came")
    assert found[names[0]].verdict == "failed"


def test_a_failure_in_one_process_is_a_failure() -> None:
    names = [check.name for check in (*backend.IN_SESSION, *backend.IN_OWN_SESSION)]
    good = dict.fromkeys(names, "")
    found = outcomes_of({0: good, 1: {**good, names[4]: "2 != 3"}}, None)
    assert {name for name, o in found.items() if o.verdict == "failed"} == {names[4]}
    assert found[names[4]].reason == "process 1: 2 != 3"


def test_missing_capabilities_are_shown_with_their_reasons() -> None:
    can = Capabilities(
        frozenset({Capability.COMPUTE}), {Capability.SUBGROUPS: "for want of a library"}
    )
    assert Check(sums, frozenset({Capability.COMPUTE})).obstacle(can) is None
    obstacle = Check(sums, frozenset({Capability.SUBGROUPS})).obstacle(can)
    assert obstacle == "the backend has no subgroups: for want of a library"


def test_a_scorecard_shows_every_check() -> None:
    outcomes = (CHECK.passed(), FAILED, CHECK.skipped("no numbers"))
    card = Scorecard("backend", "abacus", "abacus", 2, outcomes)
    shown = commands.scorecard_text(card)
    assert "backend abacus, 2 replicas: 1 passed, 1 failed, 1 skipped" in shown
    for part in ("Sums are sums.", "no numbers", "2 + 2", "= 5"):
        assert part in shown
    assert not card.passed
    assert card.to_dict()["outcomes"][1] == {
        "check": "sums",
        "meaning": "Sums are sums.",
        "verdict": "failed",
        "reason": "2 + 2\n= 5",
    }


def test_a_strategy_without_a_backend_is_told_why() -> None:
    class Demanding(Strategy):
        name = "demanding"
        summary = "-"
        requires = frozenset({"telepathy"})  # type: ignore[assignment]

        def step(self, group: Any, batch: Any, learning_rate: float) -> Any: ...

    with pytest.raises(PlanError, match="telepathy"):
        strategy.fitting_backend(Demanding(), plugin_manager())


def test_an_unknown_name_lists_the_available_ones() -> None:
    with pytest.raises(IsotrainError, match=r"unknown backend or strategy 'data-paralel'.*Did you"):
        commands.scorecard_of("data-paralel", {}, backend=None, replicas=2)


def test_options_of_a_backend_are_refused() -> None:
    with pytest.raises(IsotrainError, match=r"'torch-ddp' is a backend; received method"):
        commands.scorecard_of("torch-ddp", {"method": "fp16"}, backend=None, replicas=2)


@pytest.mark.parametrize(
    ("arguments", "checked"),
    [
        (["torch-ddp:gloo"], ("backend", "torch-ddp:gloo", {"replicas": 2})),
        (
            ["data-parallel"],
            ("strategy", "data-parallel", {"backend": None, "replicas": 2, "options": {}}),
        ),
        (
            ["x", "--backend", "torch-ddp", "--replicas", "3"],
            ("strategy", "x", {"backend": "torch-ddp", "replicas": 3, "options": {}}),
        ),
        (
            ["compressed,method=topk,ratio=0.5"],
            (
                "strategy",
                "compressed",
                {"backend": None, "replicas": 2, "options": {"method": "topk", "ratio": 0.5}},
            ),
        ),
    ],
)
@pytest.mark.parametrize("passes", [True, False])
def test_the_command_checks_a_backend_or_a_strategy(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    checked: Any,
    passes: bool,
) -> None:
    asked: list[Any] = []

    def card(kind: Any, name: str, **given: Any) -> Scorecard:
        asked.append((kind, name, given))
        return Scorecard(kind, name, "torch-ddp", 2, (CHECK.passed() if passes else FAILED,))

    monkeypatch.setattr(backend, "check_backend", functools.partial(card, "backend"))
    monkeypatch.setattr(strategy, "check_strategy", functools.partial(card, "strategy"))
    code = main(["conformance", *arguments, "--json"])
    assert code == (ExitCode.OK if passes else ExitCode.FINDINGS)
    assert asked == [checked]
    told = json.loads(capsys.readouterr().out)["scorecard"]
    assert (told["kind"], told["name"], told["passed"]) == (*checked[:2], passes)
    assert main(["conformance", *arguments]) == code
    assert f"{checked[0]} {checked[1]}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kernel": 2.0 + 2.0**-50}, "largest differences"),
        ({"bias": 1.0, "kernel": 2.0}, "bias"),
        ({"kernel": 1.0}, "not trained at all"),
    ],
)
def test_native_equality_is_to_the_bit(changed: dict[str, float], told: str) -> None:
    start, end = {"kernel": np.array(1.0)}, {"kernel": np.array(2.0)}
    ours = {"start": start, "weights": end}
    assert_native_equality(ours, lambda given: {"kernel": given["kernel"] * 2})
    other = {name: np.array(value) for name, value in changed.items()}
    ours = ours if told != "not trained at all" else {"start": start, "weights": start}
    with pytest.raises(AssertionError, match=told):
        assert_native_equality(ours, lambda given: other)


KILLED = "rank 1 of 2 was ended by SIGKILL after step 3, in call 'between calls'."
STUCK = "rank 1 of 2 made no progress for 5 s at step 4, in call 'next batch'."


def ended(
    monkeypatch: pytest.MonkeyPatch, folder: Path, check: Check, failure: str | None, seconds: float
) -> str | None:
    """Why a check of a run that goes wrong fails, if the run goes like this."""
    notes = {1: {"failure_time": 100.0}} if failure is None or "before" not in failure else {}
    run = Run([], notes, failure, 100.0 + seconds, 0.0, folder)
    monkeypatch.setattr(crash_checks, "try_run", lambda *given: run)
    return backend.crash_outcome(check, "torch-ddp", 2).reason


@pytest.mark.parametrize(
    ("check", "failure", "seconds", "told"),
    [
        (0, KILLED, 3.0, None),
        (1, STUCK, 8.0, None),
        (0, None, 3.0, "as if nothing had happened"),
        (0, KILLED, 60.0, "it took 60.0 s"),
        (0, KILLED.replace("rank 1", "rank 0"), 3.0, "expected: rank 1 of 2 was ended"),
        (0, KILLED, 3.0, "a fault of the process itself: no peer"),
        (0, "rank 0 raised ValueError before that", 3.0, "the run failed before that"),
        (1, STUCK.replace("next batch", "step"), 8.0, "the call is not named"),
        (1, KILLED, 8.0, "expected: rank 1 of 2 made no progress"),
    ],
)
def test_verdicts_on_failed_runs(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    check: int,
    failure: str | None,
    seconds: float,
    told: str | None,
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    is_peer_error = told is None or "itself" not in told
    failed = {"event": "failed", "message": "no peer", "is_peer_error": is_peer_error}
    (folder / "events.jsonl").write_text(json.dumps(failed))
    reason = ended(monkeypatch, folder, backend.CRASH_CHECKS[check], failure, seconds)
    assert reason is None if told is None else told in str(reason)
    assert folder.exists() == (told is not None)  # only of what has to be looked into


def test_a_busy_machine_is_given_more_time_to_hang(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    too_slow = Run([], {}, STUCK, 0.0, 0.0, tmp_path)
    stuck = Run([], {1: {"failure_time": 100.0}}, STUCK, 170.0, 0.0, tmp_path)
    limits = []

    def try_run(work: Any, spec: Any, *given: Any) -> Run:
        limits.append(spec["timeouts"]["progress"])
        return stuck if len(limits) == len(crash_checks.PROGRESS_SECONDS) else too_slow

    monkeypatch.setattr(crash_checks, "try_run", try_run)
    assert backend.crash_outcome(backend.CRASH_CHECKS[1], "torch-ddp", 2).verdict == "passed"
    assert limits == list(crash_checks.PROGRESS_SECONDS)


def test_a_process_that_lingers_is_no_clean_exit() -> None:
    names = [check.name for check in (*backend.IN_SESSION, *backend.IN_OWN_SESSION)]
    good = dict.fromkeys(names, "")
    run = Run([], {0: good, 1: good}, None, 0.0, 5.5, Path())
    adapter = plugin_manager().backend("torch-ddp")
    *_, last = backend.run_outcomes(adapter, run, processes=2)
    assert last.check == "clean_exit"
    assert last.reason is not None
    assert "still there 5.5 s" in last.reason


def test_a_spec_keeps_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run on the CPU, the reference of those on a GPU, would take place on the GPU too."""
    monkeypatch.setenv(DEVICE_VARIABLE, "gpu")
    assert on_device({"device": "cpu"}) == {"device": "cpu"}
    assert on_device({"seed": 1}) == {"device": "gpu", "seed": 1}
    monkeypatch.delenv(DEVICE_VARIABLE)
    assert on_device({"seed": 1}) == {"seed": 1}
