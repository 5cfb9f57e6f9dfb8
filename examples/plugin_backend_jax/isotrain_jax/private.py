"""The parts of JAX that it does not document and this backend uses; nothing else touches such parts."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.backend import clear_backends
from jaxlib import _jax

from isotrain.plugin import private_api

_HOST = "127.0.0.1"


@contextlib.contextmanager
def gloo_listening_on(host: str) -> Iterator[None]:
    """Makes gloo listen on one address; it would take the one that the host's name stands for."""
    original = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = functools.partial(original, hostname=host)
    try:
        yield
    finally:
        _jax.make_gloo_tcp_collectives = original


def _is_what_jax_calls() -> None:
    original, told = _jax.make_gloo_tcp_collectives, []

    def noting(*given: Any, **options: Any) -> Any:
        told.append(options.get("hostname"))
        return original(*given, **options)

    with socket.socket() as free:
        free.bind((_HOST, 0))
        address = f"{_HOST}:{free.getsockname()[1]}"
    clear_backends()  # nobody is joined once there are devices
    _jax.make_gloo_tcp_collectives = noting
    try:
        jax.distributed.initialize(
            address, 1, 0, coordinator_bind_address=address, cluster_detection_method="deactivate"
        )
        with gloo_listening_on(_HOST):
            jax.devices("cpu")
    finally:
        _jax.make_gloo_tcp_collectives = original
        jax.distributed.shutdown()
        clear_backends()
    private_api.require(told == [_HOST], "jaxlib._jax makes gloo's collectives, on a host")


PROBES = (private_api.PrivateApiProbe("jaxlib._jax.make_gloo_tcp_collectives", _is_what_jax_calls),)
