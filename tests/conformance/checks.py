"""The conformance checks: what every backend must pass, by name.

Each is a function of a `Bench`. It asks for capabilities, never for a backend's name; it does all that
needs the other processes before it asserts, so that a process that fails does not leave the others
waiting; and it raises with a text that says what was found and what was expected.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

from conformance import check_collectives, check_observing, check_state, check_training
from conformance.bench import Bench

from isotrain.core.capabilities import Capability
from isotrain.core.session import Session

Check = Callable[[Bench], None]

STEP = Capability.SYNCHRONISED_STEP
STATE = Capability.NAMED_STATE
GRADIENTS = Capability.GRADIENTS

CHECKS: dict[Check, frozenset[Capability]] = {
    check_training.start_is_equal: frozenset({STATE}),
    check_training.dropout_differs: frozenset({STATE, GRADIENTS}),
    check_collectives.all_reduce_sum: frozenset({Capability.ALL_REDUCE}),
    check_collectives.all_reduce_mean: frozenset({Capability.ALL_REDUCE}),
    check_collectives.all_reduce_max: frozenset({Capability.ALL_REDUCE}),
    check_collectives.inputs_are_left_alone: frozenset(
        {Capability.ALL_REDUCE, Capability.BROADCAST}
    ),
    check_collectives.all_gather: frozenset({Capability.ALL_GATHER}),
    check_collectives.broadcast: frozenset({Capability.BROADCAST}),
    check_collectives.broadcast_keeps_bits: frozenset({Capability.BROADCAST}),
    check_collectives.reduce_scatter_sum: frozenset({Capability.REDUCE_SCATTER}),
    check_collectives.reduce_scatter_mean: frozenset({Capability.REDUCE_SCATTER}),
    check_collectives.send_receive: frozenset({Capability.SEND_RECEIVE}),
    check_collectives.barrier: frozenset(),
    check_training.order: frozenset(),
    check_training.sizes: frozenset(),
    check_training.training: frozenset({STEP, STATE}),
    check_training.training_metrics: frozenset({STEP, STATE}),
    check_training.moving_statistics: frozenset({STEP, STATE}),
    check_training.replicas_stay_equal: frozenset({STEP, STATE, GRADIENTS}),
    check_training.exact_mean_of_gradients: frozenset({STATE, GRADIENTS}),
    check_training.synchronised_step: frozenset({STEP, STATE}),
    check_training.accumulation: frozenset({STEP, STATE}),
    check_training.gradients_and_apply: frozenset({STEP, STATE, GRADIENTS, Capability.ALL_REDUCE}),
    check_training.local_step: frozenset({STATE, Capability.LOCAL_STEP}),
    check_training.local_step_without_samples: frozenset({STATE, Capability.LOCAL_STEP}),
    check_training.average_parameters: frozenset(
        {STATE, GRADIENTS, Capability.LOCAL_STEP, Capability.AVERAGE_PARAMETERS}
    ),
    check_state.state_round_trip: frozenset({STEP, STATE}),
    check_state.state_kinds: frozenset({STATE}),
    check_state.state_is_a_copy: frozenset({STEP, STATE}),
    check_state.unknown_state_is_refused: frozenset({STATE}),
    check_state.evaluation: frozenset({STATE}),
    check_state.evaluation_changes_nothing: frozenset({STEP, STATE}),
    check_observing.undisturbed_gradients: frozenset({STEP, STATE, GRADIENTS}),
    check_observing.kept_gradients: frozenset({STEP, STATE, GRADIENTS}),
}
"""Every check with what it asks of a backend.

The one on dropout comes before any on uneven slices, which alone would move random streams apart.
"""

NAMES = tuple(check.__name__ for check in CHECKS)
NEEDS = {check.__name__: needed for check, needed in CHECKS.items()}


def run_checks(session: Session) -> dict[str, Any]:
    """Makes every check that the backend's capabilities allow; the work of a launch.

    Returns:
        `failures`: check name to what is wrong, or an empty text; checks that were not made are not
        in it. `seconds`: check name to how long it took. `start`: the weights before the first step.
    """
    bench = Bench(session)
    failures, seconds = {}, {}
    for check, needed in CHECKS.items():
        if bench.supported.issuperset(needed):
            started = time.monotonic()
            failures[check.__name__] = _failure(check, bench)
            seconds[check.__name__] = round(time.monotonic() - started, 3)
    start = bench.starts[0] if session.is_main else {}
    return {"failures": failures, "seconds": seconds, "start": start}


def _failure(check: Check, bench: Bench) -> str:
    bench.board.share({})
    try:
        check(bench)
    except AssertionError as error:
        return str(error) or traceback.format_exc()
    except Exception:
        return traceback.format_exc()
    return ""
