"""Waits for the rendezvous server of rank 0, without the pauses of the frameworks' own retries."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from isotrain.plugin import PeerLostError, ProcessContext

_RETRY_SECONDS = 0.005
_PATIENCE_SECONDS = 5.0


def wait_for_rank_zero(
    context: ProcessContext,
    patience: float = _PATIENCE_SECONDS,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Returns once the rendezvous server accepts connections, or after a timeout; at once on rank 0.

    A refused connection costs a replica half a second in torch's store, and a second in TensorFlow's
    channels: as long as all the rest of its start.

    Args:
        context: Rank and rendezvous address of this process.
        patience: Timeout in seconds, after which the framework waits in its own way and raises its own error.
        is_interrupted: Whether to wait no longer, as a member is lost.

    Raises:
        PeerLostError: A member is lost.
    """
    if context.rank == 0:
        return
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            socket.create_connection(context.rendezvous, patience).close()
        except ConnectionRefusedError:
            if is_interrupted():
                raise PeerLostError("a member of the process group is lost") from None
            time.sleep(_RETRY_SECONDS)
        except OSError:
            return
        else:
            return
