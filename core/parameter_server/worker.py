"""Worker of a parameter-server run over TCP: computes gradients until the connection is closed."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from isotrain.core.contracts.backend.group_protocols import WorkerGroup
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.events import Ready
from isotrain.core.contracts.process import ServerConnection
from isotrain.core.contracts.reporter import BETWEEN_CALLS
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.pytree import decode_tree
from isotrain.core.parameter_server.flat_state import (
    STATISTICS,
    WEIGHTS,
    flat_update,
    read_parts,
    write_parts,
)
from isotrain.core.transport.connection import Connection, ConnectionLostError, connect

_WEIGHTS_AND_STATISTICS = (*WEIGHTS, *STATISTICS)


def serve(server_connection: ServerConnection, build: Any) -> None:
    """Connects to the coordinator, builds the replica and computes; the group is never closed."""
    server_connection.reporter.enter("join")
    connection = connect(server_connection)
    try:
        server_connection.reporter.enter("build model")
        group: ReplicaGroup = build()
        connection.send({})
        server_connection.reporter.emit(Ready())
        _WorkerLoop(group, connection, server_connection).run()
    except ConnectionLostError:
        return  # the coordinator has finished, or counts this worker as lost
    except Exception as error:
        _send_error(connection, error)
        raise


def _send_error(connection: Connection, error: Exception) -> None:
    try:
        connection.send({"error": f"{type(error).__name__}: {error}"})
    except ConnectionLostError:
        return


class _WorkerLoop:
    def __init__(
        self, group: ReplicaGroup, connection: Connection, server_connection: ServerConnection
    ) -> None:
        self._group = group
        self._worker = require(group, WorkerGroup)
        self._connection = connection
        self._reporter = server_connection.reporter
        self._weights: Any = None
        self._statistics_size = 0

    def run(self) -> NoReturn:
        """Carries out the coordinator's requests; raises ConnectionLostError at the end of the connection."""
        while True:
            self._reporter.enter(BETWEEN_CALLS)
            header, arrays = self._connection.receive()
            if "step" in header:
                self._step(header, arrays)
            elif "execution_state" in header:
                self._group.write_state(dict(zip(header["execution_state"], arrays, strict=True)))
            else:
                execution_state = self._group.read_state(("execution",))
                self._connection.send(
                    {"execution_state": list(execution_state)}, list(execution_state.values())
                )

    def _step(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Answers a request; `arrays` has the slices' arrays and last, if sent, one vector of new weights."""
        self._reporter.step = header["step"]
        self._reporter.enter("step")
        if header["has_weights"]:
            self._set_weights(arrays.pop())
        self._compute(header, arrays)

    def _set_weights(self, vector: np.ndarray) -> None:
        """Keeps new weights, then moving statistics: one vector, 1-D."""
        group = self._group
        if self._weights is None:
            statistics = group.compute(read_parts, static=STATISTICS)
            self._statistics_size = group.numpy(statistics[0]).size
        self._weights = group.tensor(vector)

    def _compute(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Sends the update of some slices: a vector of weighted gradients and statistics; metric state."""
        group = self._group
        group.compute(write_parts, [self._weights], static=_WEIGHTS_AND_STATISTICS)
        slices = tuple(self._decode_slice(encoded, arrays) for encoded in header["slices"])
        count = sum(micro_batch.count for micro_batch in slices)
        even = len(slices) == 1 and slices[0].weight == 1.0
        batch = Batch(0, 0, header["step"], count, False, even, (slices,))
        self._worker.reseed(header["replica"], header["step"])
        gradients, loss = group.gradients(batch)
        update = group.compute(
            flat_update, gradients, [self._weights], static=self._statistics_size
        )
        result = [group.numpy(update[0]), self._worker.pop_metric_state()]
        self._connection.send({"loss": float(loss)}, result)

    def _decode_slice(self, encoded: list[Any], arrays: list[np.ndarray]) -> Slice:
        """Slice on the device, whose inputs and targets are arrays of shape `[count, ...]`."""
        inputs, targets, count, weight = encoded
        to_device = self._group.to_device
        return Slice(
            to_device(decode_tree(inputs, arrays)),
            None if targets is None else to_device(decode_tree(targets, arrays)),
            count,
            weight,
        )
