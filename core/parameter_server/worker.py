"""The worker of a parameter-server run: computes gradients of slices until the coordinator is gone."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from isotrain.core.contracts.events import Ready
from isotrain.core.contracts.process import ServerConnection
from isotrain.core.contracts.replica_group import ReplicaGroup
from isotrain.core.contracts.reporter import BETWEEN_CALLS
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.parameter_server.flat_state import (
    STATISTICS,
    WEIGHTS,
    change,
    read_parts,
    write_parts,
)
from isotrain.core.transport.codec import decode_tree
from isotrain.core.transport.connection import Connection, ConnectionLostError, connect

_EVERYTHING = (*WEIGHTS, *STATISTICS)


def serve(server_connection: ServerConnection, build: Any) -> None:
    """Connects, builds the replica and works; it ends with the process, and is not closed before.

    Args:
        server_connection: Of this worker.
        build: Makes its group of one replica.
    """
    server_connection.reporter.enter("join")
    wire = connect(server_connection)
    try:
        server_connection.reporter.enter("build model")
        group: ReplicaGroup = build()
        wire.send({})
        server_connection.reporter.emit(Ready())
        _Work(group, wire, server_connection).until_closed()
    except ConnectionLostError:
        return  # the coordinator has finished, or has given this worker up
    except Exception as error:
        _tell(wire, error)
        raise


def _tell(wire: Connection, error: Exception) -> None:
    try:
        wire.send({"error": f"{type(error).__name__}: {error}"})
    except ConnectionLostError:
        return


class _Work:
    def __init__(
        self, group: ReplicaGroup, wire: Connection, server_connection: ServerConnection
    ) -> None:
        self._group = group
        self._wire = wire
        self._reporter = server_connection.reporter
        self._before: Any = None
        self._statistics = 0

    def until_closed(self) -> NoReturn:
        """Does what it is told; raises ConnectionLostError once the coordinator has closed the connection."""
        while True:
            self._reporter.enter(BETWEEN_CALLS)
            header, arrays = self._wire.receive()
            if "step" in header:
                self._step(header, arrays)
            elif "execution_state" in header:
                self._group.write_state(dict(zip(header["execution_state"], arrays, strict=True)))
            else:
                execution_state = self._group.read_state(("exchange",))
                self._wire.send(
                    {"execution_state": list(execution_state)}, list(execution_state.values())
                )

    def _step(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self._reporter.step = header["step"]
        self._reporter.enter("step")
        if header["newer"]:
            self._take_weights(arrays.pop())
        self._compute(header, arrays)

    def _take_weights(self, vector: np.ndarray) -> None:
        group = self._group
        if self._before is None:
            own = group.compute(read_parts, static=STATISTICS)
            self._statistics = group.numpy(own[0]).size
        self._before = group.tensor(vector)

    def _compute(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        group = self._group
        group.compute(write_parts, [self._before], static=_EVERYTHING)
        pieces = tuple(self._slice(piece, arrays) for piece in header["pieces"])
        count = sum(piece.count for piece in pieces)
        even = len(pieces) == 1 and pieces[0].weight == 1.0
        batch = Batch(0, 0, header["step"], count, False, even, (pieces,))
        group.reseed(header["replica"], header["step"])
        gradients, loss = group.gradients(batch)
        found = group.compute(change, gradients, [self._before], static=self._statistics)
        answer = [group.numpy(found[0]), group.pop_metric_state()]
        self._wire.send({"loss": float(loss)}, answer)

    def _slice(self, plain: list[Any], arrays: list[np.ndarray]) -> Slice:
        inputs, targets, count, weight = plain
        place = self._group.to_device
        return Slice(
            place(decode_tree(inputs, arrays)),
            None if targets is None else place(decode_tree(targets, arrays)),
            count,
            weight,
        )
