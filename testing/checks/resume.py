"""Checks that new processes resume from the state of another run and continue it to the bit."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.plan import split_backend
from isotrain.core.contracts.state import ALL_STATE
from isotrain.core.contracts.strategy import StrategyState
from isotrain.core.data.dataset import DataSet
from isotrain.core.errors import UnsupportedError
from isotrain.core.planning.planner import make_plan
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.session.session import Session
from isotrain.core.spec.loading import load_spec
from isotrain.testing import digits, reference_model
from isotrain.testing.consecutive_sessions import launched_in_turn
from isotrain.testing.launching import SpecFields, on_device

REPLICAS = 2
"""Number of replicas: a sum of two is the same to the bit in any order; that of more need not be."""
SPLIT = 6
"""Steps before the state is saved: in the middle of the second epoch, after an uneven batch."""

Cases = Mapping[str, SpecFields]
Results = dict[str, Any]
"""State and results of one process, in types that a run can return."""


def noisy_data() -> DataSet:
    """Samples of the reference model with a noise input of 0.5, on which dropout acts."""
    return DataSet(reference_model.samples(noise=0.5))


def first_twenty() -> DataSet:
    """First twenty of these samples."""
    return DataSet(reference_model.samples(20, noise=0.5))


_OF_ONE_SIZE: SpecFields = {"data": first_twenty, "global_batch_size": 5}
"""Spec fields for batches of one uneven split, so that frameworks trace and compile once."""


def cases(adapter: Adapter, backend: str) -> Cases:
    """Specs to resume, by name, of those that the backend supports."""
    changes: Cases = {
        "momentum": {"data": noisy_data},
        "loss scale": {
            "precision": "float16",
            "loss_scale": {"initial": 1024.0, "growth_steps": 4},
            "optimizer": {"name": "adam", "lr": 2.0**-6},
            **_OF_ONE_SIZE,
        },
    }
    specs = {name: reference_model.spec(adapter, **fields) for name, fields in changes.items()}
    return {name: spec for name, spec in specs.items() if _is_supported(spec, backend)}


def _is_supported(spec: SpecFields, backend: str) -> bool:
    try:
        resolved = ResolvedSpec(load_spec(on_device(spec)), plugin_manager())
        make_plan(resolved, backend=backend, replicas=REPLICAS)
    except UnsupportedError:
        return False
    return True


def resumes_exactly(backend: str) -> None:
    """From the state of another run, new processes take exactly the steps of that run."""
    adapter = plugin_manager().backend(split_backend(backend)[0])
    differences = [text for text in problems(cases(adapter, backend), backend).values() if text]
    assert not differences, "\n".join(differences)


def strategy_resumes_exactly(name: str, options: Mapping[str, Any], backend: str) -> None:
    """From the state of another run, new processes take exactly the steps of that run."""
    difference = problems({name: strategy_resume_case(name, options, backend)}, backend)[name]
    assert not difference, difference


def strategy_resume_case(name: str, options: Mapping[str, Any], backend: str) -> SpecFields:
    """Spec to resume with a strategy."""
    plugins = plugin_manager()
    adapter = plugins.backend(split_backend(backend)[0])
    chosen = {"name": name, "options": dict(options)}
    parallel_layout = plugins.strategy(name, dict(options)).parallel_layout
    if staged := digits.staged_fields(parallel_layout, REPLICAS):
        # no pipeline stage can call the whole model, as the objective of the reference model does
        momentum = {"name": "sgd", "lr": digits.RATE, "momentum": 0.5}
        count = 3 * digits.GLOBAL_BATCH + 1
        fields = {**staged, "optimizer": momentum, "epochs": 2}
        return digits.spec(count, adapter=adapter, strategy=chosen, **fields)
    return reference_model.spec(adapter, strategy=chosen, **_OF_ONE_SIZE)


def problems(specs: Cases, backend: str, replicas: int = REPLICAS) -> dict[str, str]:
    """Difference of each resumed run from the uninterrupted one; an empty text where there is none.

    Two runs are launched for all specs; each opens the sessions one after the other.

    Args:
        specs: Specs to resume, by name.
        backend: Backend, `NAME` or `NAME:COLLECTIVE`.
        replicas: Number of replicas. With more than two, the group is not checked for returning to its own
            start, because its all-reduce may by then sum in another order.
    """
    first = launched_in_turn(specs, _uninterrupted, backend, replicas)
    states = [{name: rank[name]["kept"] for name in specs} for rank in first]
    second = launched_in_turn(specs, functools.partial(_resumed, states=states), backend, replicas)
    keys = _ALL if replicas <= REPLICAS else _ALL[1:]
    return {
        name: " ".join(
            text
            for rank, (before, after) in enumerate(zip(first, second, strict=True))
            if (text := _run_difference(before[name], after[name], keys, f"{name}, rank {rank}"))
        )
        for name in specs
    }


def _uninterrupted(session: Session, name: str) -> Results:
    """Trains to the end, with the state at `SPLIT`; then restores the start and repeats the first steps."""
    start = _read_state(session)
    first = _trained(session, SPLIT)
    kept = _read_state(session)
    results = _trained(session)
    end = _read_state(session)
    _write_state(session, start)
    session.seek(0)
    again = _trained(session, SPLIT)
    return {"kept": kept, "first": first, "again": again, **results, "end": end}


def _resumed(session: Session, name: str, states: Sequence[Mapping[str, Results]]) -> Results:
    """Trains to the end from the state of another run, by rank and name."""
    _write_state(session, states[session.rank][name])
    session.seek(SPLIT)
    return {**_trained(session), "end": _read_state(session)}


def _trained(session: Session, until: int | None = None) -> Results:
    """Takes steps; returns their losses, and the metrics of each completed epoch."""
    losses, metrics = [], []
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        if batch.is_last_of_epoch:
            metrics.append(session.metrics())
        if batch.step + 1 == until:
            break
    return {"losses": losses, "metrics": metrics}


def _read_state(session: Session) -> Results:
    """State of this process: that of its replicas, and that of its strategy."""
    group, strategy = session.group, session.strategy.state(session.group)
    replicas = group.local_replicas
    return {
        "group": {str(r): group.read_state(ALL_STATE, replica=r) for r in replicas},
        "values": dict(strategy.values),
        "tensors": dict(strategy.tensors),
        "per_replica": {str(r): dict(arrays) for r, arrays in strategy.per_replica.items()},
    }


def _write_state(session: Session, state: Results) -> None:
    """Writes a state that `_read_state` returned."""
    session.group.reshard_weights()
    for replica, arrays in state["group"].items():
        session.group.write_state(arrays, replica=int(replica))
    per_replica = {int(replica): arrays for replica, arrays in state["per_replica"].items()}
    strategy_state = StrategyState(state["values"], state["tensors"], per_replica)
    session.strategy.load_state(session.group, strategy_state)


_ALL = (("first", "again"), ("losses", "losses"), ("metrics", "metrics"), ("end", "end"))
"""Compared results: the key in the uninterrupted run, and the key in the resumed one."""


def _run_difference(
    before: Results, after: Results, keys: Sequence[tuple[str, str]], where: str
) -> str:
    """First difference of a resumed run from the uninterrupted one; empty if there is none."""
    both = {**after, "again": before["again"]}
    texts = (_difference(before[old], both[new], f"{where}: {new}") for old, new in keys)
    return next(filter(None, texts), "")


def _difference(expected: Any, actual: Any, what: str) -> str:
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.keys() != actual.keys():
            return f"{what}: {sorted(actual)}, and not {sorted(expected)}."
        texts = (_difference(v, actual[n], f"{what}: {n}") for n, v in expected.items())
        return next(filter(None, texts), "")
    array = np.asarray(expected)
    same = np.array_equal(array, np.asarray(actual), equal_nan=array.dtype.kind == "f")
    return "" if same else f"{what} is {actual}, and not {expected}."
