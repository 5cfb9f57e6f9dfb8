"""Checks of a strategy, on the results that the processes of a run returned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.strategy import Invariant, Strategy
from isotrain.testing import digits, reference_model
from isotrain.testing.digits import Oracle, Weights
from isotrain.testing.strategy_runs import HALF, SMALL_RATE, WHOLE

SCALARS = 64
"""Bytes of optimizer state that belongs to no weight, such as step counts."""
CLOSE = 1e-12
"""Absolute tolerance for rounding and the order of sums in float64."""
GROWTH = 1.5
"""Largest growth of the held-back gradients when the number of steps doubles; lost gradients grow by 2."""


@dataclass(frozen=True)
class Evidence:
    """Results of a run of a strategy.

    Attributes:
        strategy: Strategy under test.
        processes: Results of each process, by rank.
    """

    strategy: Strategy
    processes: list[dict[str, Any]]

    @property
    def main(self) -> dict[str, Any]:
        """Results of process 0."""
        return self.processes[0]


def strategy_declarations(strategy: Strategy) -> None:
    """The strategy's declarations are of the right type, and so are the bytes that it plans with."""
    for name in ("name", "summary"):
        text = getattr(strategy, name, None)
        assert isinstance(text, str), f"{name}: expected a text, received {text!r}"
        assert text.strip(), f"{name} is empty"
    unknown = [name for name in strategy.requires if not isinstance(name, Capability)]
    assert not unknown, f"requires: {unknown} are no members of isotrain.Capability"
    assert strategy.keeps_replicas_equal in ("always", "finally", "never"), (
        f"keeps_replicas_equal: {strategy.keeps_replicas_equal!r}"
    )
    other = [name for name in strategy.invariants if not isinstance(name, Invariant)]
    assert not other, f"invariants: {other} are no members of Invariant"
    for replicas in (1, 2, 8):
        nbytes = strategy.exchanged_bytes(4096, replicas)
        assert nbytes is None or 0 <= nbytes < math.inf, (
            f"exchanged_bytes(4096, {replicas}) is {nbytes!r}"
        )


def declares_what_it_uses(evidence: Evidence) -> None:
    """From the first step on, the strategy uses no capability that `requires` does not have."""
    used = {Capability(name) for process in evidence.processes for name in process["used"]}
    missing = sorted(used - evidence.strategy.requires)
    assert not missing, f"used and not declared: {', '.join(missing)}"


def loss_is_of_the_global_batch(evidence: Evidence) -> None:
    """A step gives the mean loss of its global batch, the same on every process."""
    first = reference_model.epoch_batches(0, digits.GLOBAL_BATCH, digits.TRAIN)[0]
    expected = Oracle(evidence.main["start"]).loss(first)
    for rank, process in enumerate(evidence.processes):
        _assert_close(process["losses"][0], expected, f"first loss on process {rank}")
        assert process["losses"] == evidence.main["losses"], (
            f"the losses on process {rank} are not those on process 0"
        )


def replicas_are_equal(evidence: Evidence) -> None:
    """All replicas have the same weights, bit for bit, when the strategy says so."""
    always = evidence.strategy.keeps_replicas_equal == "always"
    moments = [p["fingerprints"] if always else p["fingerprints"][-1:] for p in evidence.processes]
    for number, of_processes in enumerate(zip(*moments, strict=True)):
        replicas = [fingerprint for process in of_processes for fingerprint in process]
        when = f"after step {number}" if number < len(moments[0]) - 1 else "after the last step"
        assert len(set(replicas)) == 1, (
            f"{when}, replicas differ: {len(set(replicas))} states. To the bit: rounding counts, so all"
            " have to assign what an exchange gave, and not what each has computed of that and of its own"
        )


def equals_data_parallel(evidence: Evidence) -> None:
    """After each of the first steps, the weights are those of synchronous data parallelism."""
    oracle = Oracle(evidence.main["start"])
    batches = reference_model.epoch_batches(0, digits.GLOBAL_BATCH, digits.TRAIN)
    for step, (weights, rows) in enumerate(zip(evidence.main["early"], batches, strict=False)):
        oracle.step(rows)
        _assert_weights(weights, oracle.weights, f"after step {step}")


def converges_on_digits(evidence: Evidence) -> None:
    """The accuracy on held-out digits is that of data parallelism, less at most the stated margin."""
    _assert_trained(evidence)


def survives_one_replica(evidence: Evidence) -> None:
    """The strategy also trains with one replica."""
    _assert_trained(evidence)


def survives_empty_replicas(evidence: Evidence) -> None:
    """With more replicas than samples, the loss is exact, weights stay finite, and training goes on."""
    expected = Oracle(evidence.main["start"], 1).loss(np.array([0]))
    for rank, process in enumerate(evidence.processes):
        _assert_close(process["losses"][0], expected, f"first loss on process {rank}")
        _assert_finite(process["weights"], f"process {rank}")
    changed = [
        not np.array_equal(process["weights"][name], evidence.main["start"][name])
        for process in evidence.processes
        for name in evidence.main["start"]
    ]
    assert any(changed), "no weight has changed"


def state_bytes_as_declared(evidence: Evidence) -> None:
    """The replica with most state holds what `state_bytes` says; no shard is kept twice."""
    for process in evidence.processes:
        planned, held = process["planned"], process["held"]
        assert planned is not None, "the plan has no state_bytes"
        for what, nbytes, limit in (
            ("weights take", held["trainable"] + held["non-trainable"], planned["weights"]),
            ("optimizer state takes", held["optimizer"], planned["slots"]),
        ):
            assert nbytes <= 1.1 * limit + SCALARS, (
                f"{what} {nbytes} bytes, and {limit} are planned"
            )
    most = max(process["held"]["optimizer"] for process in evidence.processes)
    least = 0.9 * evidence.main["planned"]["slots"]
    assert most >= least, f"optimizer state takes {most} bytes, and at least {least:g} are planned"
    shards = [name for process in evidence.processes for name in process["parts"]]
    assert len(set(shards)) == len(shards), f"kept twice: {sorted(shards)}"


def keeps_parameter_mean(evidence: Evidence) -> None:
    """The communication does not change the mean over all replicas of the parameters."""
    _assert_weights(evidence.main["after"], evidence.main["before"], "mean over the replicas")


def keeps_gradient_sum(evidence: Evidence) -> None:
    """The part of the gradients that communication holds back does not grow with the number of steps."""
    gradient = Oracle(evidence.main["start"]).gradients(np.arange(digits.GLOBAL_BATCH))
    half, whole = (_held_back(evidence, gradient, steps) for steps in (HALF, WHOLE))
    rounding = 1e-5 * WHOLE * sum(np.abs(part).sum() for part in gradient.values())
    assert whole <= GROWTH * half + rounding, (
        f"{half:.3g} are held back after {HALF} steps, {whole:.3g} after {WHOLE}; expected at most"
        f" {GROWTH} times as much"
    )


def ordered_sums_keep_bits(evidence: Evidence) -> None:
    """With `reproducible: bits`, each weight gets the bits of an update by some replica's group alone."""
    for number, steps in enumerate(
        zip(*(process["steps"] for process in evidence.processes), strict=True)
    ):
        for name, before in steps[0]["before"].items():
            updates = [step["by the group"][name] for step in steps]
            updates = [update for update in updates if not np.array_equal(update, before)]
            expected = updates[0] if updates else before
            for rank, step in enumerate(steps):
                assert step["after"][name].tobytes() == expected.tobytes(), (
                    f"step {number}: {name} on process {rank} is not what `apply_gradients` of a group makes"
                    " of the same gradients, to the bit"
                )


def _held_back(evidence: Evidence, gradient: Weights, steps: int) -> float:
    """Sum of absolute differences between the full gradient updates and the change of the weights."""
    total = 0.0
    for name, part in gradient.items():
        ends = [process[f"after {steps}"][name] for process in evidence.processes]
        applied = (evidence.main["start"][name] - np.mean(ends, axis=0)) / SMALL_RATE
        total += float(np.abs(applied - steps * part).sum())
    return total


def _assert_trained(evidence: Evidence) -> None:
    for rank, process in enumerate(evidence.processes):
        _assert_finite(process["weights"], f"process {rank}")
    expected = Oracle(evidence.main["start"]).trained().accuracy()
    accuracy, margin = evidence.main["accuracy"], evidence.strategy.convergence_margin
    assert accuracy >= expected - margin, (
        f"accuracy {accuracy:.3f}; data parallelism reaches {expected:.3f}, the margin is {margin:g}"
    )


def _assert_finite(weights: Weights, what: str) -> None:
    wrong = [name for name, value in weights.items() if not np.isfinite(value).all()]
    assert not wrong, f"{what}: not finite: {', '.join(wrong)}"


def _assert_weights(actual: Weights, expected: Weights, what: str) -> None:
    for name, value in expected.items():
        _assert_close(actual[name], value, f"{what}: {name}")


def _assert_close(actual: Any, expected: Any, what: str) -> None:
    error = float(np.max(np.abs(np.asarray(actual) - np.asarray(expected))))
    assert error <= CLOSE, f"{what} is off by {error:.3g}"
