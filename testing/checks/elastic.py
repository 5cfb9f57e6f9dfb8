"""Check of a strategy that says that the others go on when replicas are lost (`why_not_elastic`)."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np

from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.session.session import Session
from isotrain.core.session.weights.weights_file import WEIGHTS
from isotrain.testing import digits
from isotrain.testing.file_exchange import FileExchange
from isotrain.testing.launching import SpecFields, try_run
from isotrain.testing.reference.comm import Communicator
from isotrain.testing.reference.layers import Array

BACKEND = "numpy"
"""Backend of the runs: the reference backend, whose exchanges can be broken off."""
REPLICAS = 4
LOST = (0, 3)
"""Ranks that are lost. One newcomer joins the others, so that three replicas go on."""
STEP = 3
"""Step that is broken off in its last exchange."""
CLOSE = 1e-12
"""Tolerance, relative to the largest element, for a strategy that says that it equals data parallelism."""
ROUNDING = 2.0**-7
"""Tolerance for other strategies: what is rounded to 16 bits depends on the number of replicas."""

_ADVICE = (
    "`why_not_elastic` returns None, which says that each replica has all state, and that a step changes it"
    " only after its last exchange. Otherwise return the reason why the others cannot go on, such as 'each"
    " replica keeps gradients that it has not sent yet'."
)

_SAVEPOINTS = (
    "`is_savepoint` says after which steps all replicas have the same weights. Of the strategy's own state,"
    " the `values` and `tensors` of `state` are kept there, and `load_state` gets them."
)

Results = dict[str, Any]


def elastic_case(name: str, options: Mapping[str, Any]) -> SpecFields:
    """Spec of an elastic run with a strategy."""
    return digits.spec(
        adapter=plugin_manager().backend(BACKEND),
        strategy={"name": name, "options": dict(options)},
        optimizer={"name": "sgd", "lr": digits.RATE, "momentum": 0.5},
        epochs=1,
        device="cpu",
        elastic={"min": REPLICAS - 1, "replacements": 1},
    )


def elastic_as_declared(name: str, options: Mapping[str, Any]) -> None:
    """When replicas are lost in the middle of a step, the others go on as if none had been.

    Those that go back to a savepoint go on as if the replicas had been lost right after it.
    """
    spec = elastic_case(name, options)
    if plugin_manager().strategy(name, dict(options)).is_savepoint(0) is not None:
        _goes_back(spec)
        return
    undisturbed = _run(_trained, spec)
    expected, exchanges = undisturbed[0]["arrays"], undisturbed[0]["exchanges"]
    assert exchanges, f"replicas exchange nothing in step {STEP}. {_ADVICE}"
    _require_equal(undisturbed, expected, CLOSE, "replicas differ")
    others = _run(functools.partial(_trained, lost_in=exchanges), spec)
    is_exact = plugin_manager().strategy(name, dict(options)).equals_data_parallel
    tolerance = CLOSE if is_exact else ROUNDING
    _require_equal(others, expected, tolerance, f"replicas were lost in step {STEP}")


def _goes_back(spec: SpecFields) -> None:
    """Checks a strategy with savepoints."""
    undisturbed = _run(_trained_from_savepoints, spec)
    first = undisturbed[0]
    assert first["exchanges"], f"replicas exchange nothing in step {first['broken']}. {_SAVEPOINTS}"
    _require_equal(undisturbed, first["arrays"], CLOSE, "replicas differ", _SAVEPOINTS)
    lost_after = _run(functools.partial(_trained_from_savepoints, lost_in=0), spec)
    _require_equal(lost_after, lost_after[0]["arrays"], CLOSE, "replicas differ", _SAVEPOINTS)
    lost_in = functools.partial(_trained_from_savepoints, lost_in=first["exchanges"])
    what = f"replicas were lost in step {first['broken']}"
    _require_equal(_run(lost_in, spec), lost_after[0]["arrays"], CLOSE, what, _SAVEPOINTS)


def _trained_from_savepoints(session: Session, lost_in: int | None = None) -> Results:
    """Takes all steps. Once replicas are lost, the others call it again for the steps from a savepoint on.

    The step that may be broken off is the second savepoint; the first if there is one, else the last step.

    Args:
        session: Session of all replicas, or of those that are there after the loss.
        lost_in: Exchange within that step in which replicas are lost, from 1; 0: they are lost before the
            first step after the last savepoint; None: none are lost.
    """
    total, is_savepoint = session.total_steps, session.strategy.is_savepoint
    savepoints = [step for step in range(total) if is_savepoint(step)]
    last, broken = savepoints[:2] if len(savepoints) > 1 else (-1, (*savepoints, total - 1)[0])
    exchanges = _Exchanges(session, lost_in)
    arrays: dict[str, Any] = {}
    for batch in session.batches():
        if lost_in == 0 and batch.step == last + 1 and session.replicas == REPLICAS:
            _lose_replicas(session)
        is_counted = batch.step == broken
        with _before_each_exchange(exchanges.begin) if is_counted else nullcontext():
            loss = float(session.step(batch))
        if batch.step > last:
            arrays[f"the loss of step {batch.step}"] = np.array(loss)
        if is_savepoint(batch.step) and (batch.step > last or lost_in is None):
            weights = session.group.read_state(WEIGHTS).items()
            arrays |= {f"{name} after step {batch.step}": array for name, array in weights}
    arrays |= session.group.read_state(WEIGHTS)
    return {"exchanges": exchanges.count, "broken": broken, "arrays": arrays, "kept": []}


def _run(work: Callable[[Session], Results], spec: SpecFields) -> list[Results]:
    """Results of the processes that are there at the end of a run."""
    run = try_run(work, spec, BACKEND, REPLICAS)
    assert run.failure is None, f"the run failed: {run.failure}\n{_ADVICE}"
    return run.returned


def _trained(session: Session, lost_in: int | None = None) -> Results:
    """Takes all steps. Once replicas are lost, the others call it again for the steps that are left.

    Args:
        session: Session of all replicas, or of those that are there after the loss.
        lost_in: Exchange within the step in which replicas are lost, from 1; None: none are lost.
    """
    arrays: dict[str, Any] = {}
    exchanges = _Exchanges(session, lost_in)
    for batch in session.batches():
        is_counted = batch.step == STEP
        with _before_each_exchange(exchanges.begin) if is_counted else nullcontext():
            loss = float(session.step(batch))
        if batch.step >= STEP:
            arrays[f"the loss of step {batch.step}"] = np.array(loss)
    kept = session.strategy.state(session.group)
    return {
        "exchanges": exchanges.count,
        "arrays": arrays | session.read_state(),
        "kept": sorted(set(kept.tensors).union(*kept.per_replica.values())),
    }


class _Exchanges:
    """Counts the exchanges of a step, and loses replicas in one of them.

    Attributes:
        count: Number of exchanges so far.
    """

    def __init__(self, session: Session, lost_in: int | None) -> None:
        """Begins at 0; replicas are lost in the exchange `lost_in`, from 1, while all are there."""
        self.count = 0
        self._session = session
        self._lost_in = lost_in

    def begin(self) -> None:
        """Counts an exchange that begins."""
        self.count += 1
        if self.count == self._lost_in and self._session.replicas == REPLICAS:
            _lose_replicas(self._session)


def _lose_replicas(session: Session) -> None:
    """Kills those that are to be lost, once all have come to this exchange."""
    FileExchange(session.run_directory, session.rank, REPLICAS).all_gather({})
    if session.rank in LOST:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _before_each_exchange(call: Callable[[], None]) -> Iterator[None]:
    """Context in which a function is called before each exchange of the reference backend."""
    gather = Communicator.gather

    def calling(communicator: Communicator, array: Array, replicas: Sequence[int]) -> list[Array]:
        call()
        return gather(communicator, array, replicas)

    with mock.patch.object(Communicator, "gather", calling):
        yield


def _require_equal(
    processes: Sequence[Results],
    expected: Mapping[str, np.ndarray],
    tolerance: float,
    what: str,
    advice: str = _ADVICE,
) -> None:
    """Asserts that each process has the expected losses and state, and nothing of the strategy's own."""
    for rank, process in enumerate(processes):
        kept = ", ".join(process["kept"])
        assert not kept, f"the strategy has state of its own: {kept}. {advice}"
        for name, array in expected.items():
            error = np.abs(process["arrays"][name] - array).max()
            largest = np.abs(array).max()
            assert error <= tolerance * largest, (
                f"{what}: {name} on process {rank} is off by {error:.2g}, where the largest element is"
                f" {largest:.2g}. {advice}"
            )
