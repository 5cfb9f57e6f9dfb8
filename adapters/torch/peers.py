"""Which errors of torch.distributed blame another process."""

from __future__ import annotations

import torch.distributed as dist

_GLOO = ("/gloo/", "pair closure")
"""In what gloo says, which has no class of its own: the file that raised it, or the end of a connection."""


def is_peer_error(error: BaseException) -> bool:
    """Whether it tells that another process is gone, or did not answer in time."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _GLOO)
