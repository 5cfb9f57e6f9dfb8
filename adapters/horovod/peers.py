"""Which errors of Horovod blame another process; imports no framework."""

from __future__ import annotations

from horovod.common.exceptions import HorovodInternalError

_SHUT_DOWN = "Horovod has been shut down"
"""What TensorFlow's operations say, whose errors have no class of Horovod's."""


def is_peer_error(error: BaseException) -> bool:
    """Whether it tells that another process has left or failed."""
    return isinstance(error, HorovodInternalError) or _SHUT_DOWN in str(error)
