"""Whether a run goes on from the state of another as that one would have: to the bit, in new processes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isotrain.core.contracts.adapter import Adapter
from isotrain.core.contracts.device_mesh import STAGE
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
from isotrain.testing.launching import SpecFields
from isotrain.testing.shared_runs import launched_in_turn

REPLICAS = 2
"""The sum of two is the same in any order; that of more need not be, to the bit."""
SPLIT = 6
"""Steps before the state is taken: in the middle of the second epoch, after an uneven batch."""

Cases = Mapping[str, SpecFields]
Taken = dict[str, Any]
"""All state of one process, as what its work returns travels."""


def noisy_data() -> DataSet:
    """The samples of the probe with an input that its dropout lets through or not."""
    return DataSet(reference_model.samples(noise=0.5))


def first_twenty() -> DataSet:
    """Of them."""
    return DataSet(reference_model.samples(20, noise=0.5))


_OF_ONE_SIZE: SpecFields = {"data": first_twenty, "global_batch_size": 5}
"""Each global batch gives one replica more than the other: frameworks trace and compile once."""


def cases(adapter: Adapter, backend: str) -> Cases:
    """What goes on, by name: as far as the backend has what it takes."""
    changes: Cases = {
        "momentum": {"data": noisy_data},
        "loss scale": {
            "precision": "float16",
            "loss_scale": {"initial": 1024.0, "growth_steps": 4},
            "optimizer": {"name": "adam", "lr": 2.0**-6},
            **_OF_ONE_SIZE,
        },
    }
    given = {name: reference_model.spec(adapter, **own) for name, own in changes.items()}
    return {name: spec for name, spec in given.items() if _is_supported(spec, backend)}


def _is_supported(spec: SpecFields, backend: str) -> bool:
    try:
        cast = ResolvedSpec(load_spec(spec), plugin_manager())
        make_plan(cast, backend=backend, replicas=REPLICAS)
    except UnsupportedError:
        return False
    return True


def resumes_exactly(backend: str) -> None:
    """From the state of another run, new processes take exactly the steps of that run."""
    adapter = plugin_manager().backend(split_backend(backend)[0])
    told = [text for text in problems(cases(adapter, backend), backend).values() if text]
    assert not told, "\n".join(told)


def strategy_resumes_exactly(name: str, options: Mapping[str, Any], backend: str) -> None:
    """From the state of another run, new processes take exactly the steps of that run."""
    told = problems({name: strategy_resume_case(name, options, backend)}, backend)[name]
    assert not told, told


def strategy_resume_case(name: str, options: Mapping[str, Any], backend: str) -> SpecFields:
    """What goes on with a strategy."""
    host = plugin_manager()
    adapter = host.backend(split_backend(backend)[0])
    chosen = {"name": name, "options": dict(options)}
    parallel_layout = host.strategy(name, dict(options)).parallel_layout
    if STAGE in parallel_layout.device_mesh(REPLICAS).sizes:
        # none of which calls the whole model, as the probe's loss does
        momentum = {"name": "sgd", "lr": digits.RATE, "momentum": 0.5}
        count = 3 * digits.GLOBAL_BATCH + 1
        return digits.spec(count, adapter=adapter, strategy=chosen, optimizer=momentum, epochs=2)
    return reference_model.spec(adapter, strategy=chosen, **_OF_ONE_SIZE)


def problems(specs: Cases, backend: str, replicas: int = REPLICAS) -> dict[str, str]:
    """What is wrong with each case; an empty text where nothing is.

    Two runs are launched for all of them: the processes of one have their sessions one after the other.

    Args:
        specs: What goes on, by name.
        backend: Under what.
        replicas: How many; with more than two it is not asked that the same group can go back, whose
            exchange may by then add up in another order.
    """
    first = launched_in_turn(specs, _whole, backend, replicas)
    states = [{name: rank[name]["kept"] for name in specs} for rank in first]
    second = launched_in_turn(specs, functools.partial(_rest, states=states), backend, replicas)
    looked_at = _ALL if replicas <= REPLICAS else _ALL[1:]
    return {
        name: " ".join(
            text
            for rank, (before, after) in enumerate(zip(first, second, strict=True))
            if (text := _difference(before[name], after[name], looked_at, f"{name}, rank {rank}"))
        )
        for name in specs
    }


def _whole(session: Session, name: str) -> Taken:
    return whole(session)


def _rest(session: Session, name: str, states: Sequence[Mapping[str, Taken]]) -> Taken:
    return rest(session, states[session.rank][name])


def whole(session: Session) -> Taken:
    """Trains to the end, and notes the state on the way; goes back to the start, and takes steps again."""
    start = taken(session)
    first = _trained(session, SPLIT)
    kept = taken(session)
    found = _trained(session)
    end = taken(session)
    given_back(session, start)
    session.seek(0)
    again = _trained(session, SPLIT)
    return {"kept": kept, "first": first, "again": again, **found, "end": end}


def rest(session: Session, kept: Taken) -> Taken:
    """Goes on to the end from the state of another run."""
    given_back(session, kept)
    session.seek(SPLIT)
    found = _trained(session)
    return {**found, "end": taken(session)}


def _trained(session: Session, until: int | None = None) -> Taken:
    """Takes steps; gives their losses, and the metrics of each epoch that ends."""
    losses, metrics = [], []
    for batch in session.batches():
        losses.append(float(session.step(batch)))
        if batch.is_last_of_epoch:
            metrics.append(session.metrics())
        if batch.step + 1 == until:
            break
    return {"losses": losses, "metrics": metrics}


def taken(session: Session) -> Taken:
    """All state that this process has: of its replicas, and of its strategy."""
    group, own = session.group, session.strategy.state(session.group)
    replicas = group.local_replicas
    return {
        "group": {str(r): group.read_state(ALL_STATE, replica=r) for r in replicas},
        "values": dict(own.values),
        "tensors": dict(own.tensors),
        "per_replica": {str(r): dict(arrays) for r, arrays in own.per_replica.items()},
    }


def given_back(session: Session, state: Taken) -> None:
    """Sets it."""
    session.group.reshard_weights()
    for replica, own in state["group"].items():
        session.group.write_state(own, replica=int(replica))
    per_replica = {int(replica): own for replica, own in state["per_replica"].items()}
    own = StrategyState(state["values"], state["tensors"], per_replica)
    session.strategy.load_state(session.group, own)


_ALL = (("first", "again"), ("losses", "losses"), ("metrics", "metrics"), ("end", "end"))
"""What is compared: of the run that was not stopped, and of the one that went on."""


def _difference(
    before: Taken, after: Taken, looked_at: Sequence[tuple[str, str]], where: str
) -> str:
    """The first thing in which a run that went on differs from the one that was not stopped."""
    both = {**after, "again": before["again"]}
    texts = (_apart(before[old], both[new], f"{where}: {new}") for old, new in looked_at)
    return next(filter(None, texts), "")


def _apart(expected: Any, found: Any, what: str) -> str:
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return f"{what}: {sorted(found)}, and not {sorted(expected)}."
        return next(
            filter(None, (_apart(v, found[n], f"{what}: {n}") for n, v in expected.items())), ""
        )
    same = np.array_equal(np.asarray(expected), np.asarray(found), equal_nan=_is_number(expected))
    return "" if same else f"{what} is {found}, and not {expected}."


def _is_number(value: Any) -> bool:
    return np.asarray(value).dtype.kind == "f"
