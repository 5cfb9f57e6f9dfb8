"""What a process of a sharded run keeps, takes and sends, in bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from conformance import tcp_counters
from integration.recomputed_models import most_bytes, peak_of_tensorflow

from isotrain.core.contracts.state import StateKind
from isotrain.core.session.session import Session
from isotrain.testing.file_exchange import FileExchange


def live_bytes(session: Session) -> dict[str, Any]:
    """The tensors that live while a step reduces its gradients."""
    import weakref

    from isotrain.strategies import sharded as module

    group, reduce = session.group, module.reduce_bucket
    trainer: Any = group.trainer  # type: ignore[attr-defined]
    kept: list[Any] = []
    peaks = []

    def noting(replica: Any, gradients: Any, *, static: Any) -> Any:
        waiting = (weight.grad for weight in trainer.trainable.values())
        held = [*gradients, *(gradient for gradient in waiting if gradient is not None)]
        held += [tensor for reference in kept if (tensor := reference()) is not None]
        peaks.append(bytes_of(held))
        results = reduce(replica, gradients, static=static)
        kept.extend(map(weakref.ref, results))
        return results

    module.reduce_bucket = noting
    try:
        session.step(next(session.batches()))
    finally:
        module.reduce_bucket = reduce
    slots = [slot for own in trainer.optimizer.state.values() for slot in own.values()]
    weights = [*trainer.trainable.values(), *trainer.frozen.values()]
    assert session.plan.state_bytes is not None
    return {
        "found": [bytes_of(weights), max(peaks), bytes_of(slots)],
        "planned": list(asdict(session.plan.state_bytes).values()),
    }


def bytes_of(tensors: Sequence[Any]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def kept_and_sent_by_layers(session: Session) -> dict[str, Any]:
    """What a TensorFlow process keeps, takes besides and sends in a step; and what layers it serves."""
    from integration import sharded_layers, sharded_modules

    group, state = session.group, session.plan.state_bytes
    assert state is not None
    first, second, _ = session.batches()
    session.step(first)
    found = {
        "held": described_bytes(session, ("trainable", "optimizer")),
        "besides": min(
            peak_of_tensorflow(session, second) for _ in range(3)
        ),  # what is sent may stay
        "planned": [state.weights, state.gradients, state.slots],
        **bytes_sent(session),
        "predicted sharded": group.predict([second.slices[0][0].inputs])[0].numpy(),
    }
    group.unshard_weights()
    found["gathered"] = described_bytes(session, ("trainable",))
    found["predicted"] = group.predict([second.slices[0][0].inputs])[0].numpy()
    name, whole = next(iter(group.read_state(("trainable",)).items()))
    group.write_state({name: whole + 1})
    group.reshard_weights()
    (info,) = [i for n, i in group.describe_state(("trainable",)).items() if n == name]
    rows = slice(info.offset[0], info.offset[0] + info.shard_shape[0])
    found["set"] = group.read_state(("trainable",))[name] - whole[rows]
    if session.rank:
        return found
    return {
        **found,
        "unusual": sharded_layers.unusual(session.spec),
        "refusals": sharded_layers.refusals(session.spec),
        "in bfloat16": sharded_layers.in_bfloat16(session.spec),
        "modules, unusual": sharded_modules.unusual(session.spec),
        "modules, refusals": sharded_modules.refusals(),
    }


def described_bytes(session: Session, kinds: Sequence[StateKind]) -> int:
    return sum(info.nbytes for info in session.group.describe_state(kinds).values())


def bytes_taken(session: Session) -> dict[str, Any]:
    """The most bytes that live in a step, and what the plan says of them."""
    from isotrain.adapters.torch.base.tensors import local_shard

    group: Any = session.group
    batch, sections = next(session.batches()), group.trainer.sections()
    kinds = sections["trainable"], sections["optimizer"]
    held = [local_shard(each) for section in kinds for each in section.read().values()]
    step = partial(session.strategy.step, group, batch, 0.0)
    assert session.plan.state_bytes is not None
    with _met_after_each_exchange(group.communicator):
        taken = most_bytes(step, besides=held)
    return {
        "taken": bytes_of(held) + taken,
        "to be taken": session.plan.state_bytes.total,
    }


@contextlib.contextmanager
def _met_after_each_exchange(exchange: Any) -> Iterator[None]:
    """Within it replicas wait until Horovod's own thread, too, has let go what it has exchanged."""

    def met(exchanged: Any) -> Any:
        def exchange_and_meet(*given: Any) -> Any:
            found = exchanged(*given)
            exchange.barrier()
            return found

        return exchange_and_meet

    names = ("all_gather_shards", "reduce_scatter")
    for name in names:
        setattr(exchange, name, met(getattr(exchange, name)))
    try:
        yield
    finally:
        for name in names:
            delattr(exchange, name)


def placeholder_bytes(session: Session) -> int:
    """What the model's own parameters take."""
    trainer: Any = session.group.trainer  # type: ignore[attr-defined]
    return bytes_of(list(trainer.trainable.values()))


def bytes_sent(session: Session, steps: int = 3) -> dict[str, Any]:
    """Bytes that this process sends in a step, in all and to each other."""
    batch, processes = next(session.batches()), len(session.plan.processes)
    board = FileExchange(session.run_directory, session.rank, processes)
    session.barrier()
    before, to_each = tcp_counters.bytes_sent(), tcp_counters.sent_to(board, processes)
    for _ in range(steps):
        session.strategy.step(session.group, batch, 0.0)
    session.group.synchronize_device()
    sent = tcp_counters.bytes_sent() - before
    return {
        "sent": sent / steps,
        "to each": (tcp_counters.sent_to(board, processes) - to_each) / steps,
        "to be sent": session.plan.exchanged_bytes_per_step,
    }
