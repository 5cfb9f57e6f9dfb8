"""The parts of Horovod that it does not document and isotrain uses; nothing else touches such parts."""

from __future__ import annotations

import http.client
import socketserver
import threading
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.adapters.horovod import build_info

ARRIVALS = "isotrain"
GATE = "all"
_POLL_S = 0.02


class RendezvousServer(RendezvousHTTPServer):
    """Horovod's key-value server on exactly one address, serving from a thread."""

    daemon_threads = True
    request_queue_size = 128
    """Ranks that may call at the same time: who finds no room among 5 tries again after 1 s, or 3 s."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), RendezvousHandler, False)
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Binds without asking the name service for the host's full name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def open_gate(self) -> None:
        """Tells the other ranks, which ask again and again, that all have come."""
        with self.cache_lock:
            self.cache.setdefault(ARRIVALS, {})[GATE] = b"open"

    def missing(self, world_size: int) -> list[int]:
        """The ranks that have not announced themselves yet."""
        with self.cache_lock:
            arrived = self.cache.get(ARRIVALS, {})
            return [rank for rank in range(1, world_size) if str(rank) not in arrived]

    def stop(self) -> None:
        """Serves no more."""
        self.shutdown()
        self.server_close()
        self._thread.join()


def _meets_others() -> None:
    server = RendezvousServer("127.0.0.1", 0)

    def answered(method: str, key: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
        try:
            connection.request(method, f"/{ARRIVALS}/{key}", body=b"here")
            return connection.getresponse().status
        finally:
            connection.close()

    try:
        require(server.missing(2) == [1], "a rank is missing until it has announced itself")
        require(answered("GET", GATE) == HTTPStatus.NOT_FOUND, "a gate that is shut at first")
        require(answered("PUT", "1") == HTTPStatus.OK, "a rank can announce itself")
        require(server.missing(2) == [], "a rank that has announced itself is there")
        server.open_gate()
        require(answered("GET", GATE) == HTTPStatus.OK, "a gate that is open")
    finally:
        server.stop()


class ParameterStub:
    """As much of an optimizer as Horovod's wrapper looks at; a real one takes seconds to import."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups


def set_compression(optimizer: Any, compression: Any) -> None:
    """Changes the compression of a `DistributedOptimizer`, which takes it in its constructor only."""
    optimizer._compression = compression


def wait_for_backward_passes(optimizer: Any, count: int) -> None:
    """Makes the hooks of a `DistributedOptimizer` exchange after so many; those under way go on."""
    optimizer.backward_passes_per_step = count


def _wraps_parameters() -> None:
    import horovod.torch as hvd
    import torch

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        ParameterStub([{"params": [weight]}]),
        named_parameters=[("weight", weight)],
        compression=hvd.Compression.none,
        backward_passes_per_step=3,
    )
    require(optimizer._compression is hvd.Compression.none, "the compression in `_compression`")
    require(optimizer.backward_passes_per_step == 3, "the passes in `backward_passes_per_step`")


def probes(framework: str, built: Mapping[str, bool]) -> tuple[PrivateApiProbe, ...]:
    """Those that are used under a framework; to be tested while Horovod runs.

    Args:
        framework: `torch` or `tensorflow`.
        built: What Horovod says it was built with, by name.
    """

    def reads_the_library() -> None:
        found = build_info.installed(framework)
        assert found is not None
        assert found.extension is not None
        for name, has in built.items():
            require(build_info.has_collective(found.extension, name) == has, f"{name}: {has}")

    wrapper = PrivateApiProbe("torch.DistributedOptimizer", _wraps_parameters)
    return (
        PrivateApiProbe("runner.http.http_server", _meets_others),
        PrivateApiProbe("the names in its library", reads_the_library),
        *((wrapper,) if framework == "torch" else ()),
    )
