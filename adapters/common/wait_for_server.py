"""Waiting for the server that rank 0 opens, without the pauses that frameworks make before they try again."""

from __future__ import annotations

import socket
import time

from isotrain.plugin import ProcessContext

_RETRY_SECONDS = 0.005
_PATIENCE_SECONDS = 5.0


def wait_for_rank_zero(context: ProcessContext, patience: float = _PATIENCE_SECONDS) -> None:
    """Returns once somebody listens where the processes meet, or after a while; at once for rank 0.

    A connection that is refused costs a replica half a second in torch's store, and a second in TensorFlow's
    channels: as long as all the rest of its start.

    Args:
        context: Of this process.
        patience: Seconds, after which the framework goes on waiting in its own way, and says in its own words
            what is wrong.
    """
    if context.rank == 0:
        return
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            socket.create_connection(context.rendezvous, patience).close()
        except ConnectionRefusedError:
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return
        else:
            return
