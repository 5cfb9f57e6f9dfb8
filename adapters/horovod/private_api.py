"""Undocumented parts of Horovod that isotrain uses, all in this module, with probes for changes."""

from __future__ import annotations

import http.client
import importlib
import socketserver
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from isotrain.adapters.common.private_api import PrivateApiProbe, require
from isotrain.adapters.horovod import build_info

ARRIVALS = "isotrain"
"""Scope of the keys under which ranks announce themselves."""
ALL_ARRIVED = "all"
"""Key that is set once all ranks have announced themselves."""
ADDRESS_BYTES = 136
"""Size of an address of Gloo in the rendezvous: a `struct sockaddr_storage`, and a number."""
NO_ADDRESS = b"lost"
"""Value that Gloo refuses, with an error, where it expects addresses."""
_OPERATIONS = {"torch": "mpi_lib", "tensorflow": "MPI_LIB"}
"""Name of the compiled operations in `mpi_ops`, by framework."""
_POLL_S = 0.02


class RendezvousServer(RendezvousHTTPServer):
    """Horovod's rendezvous server (a key-value store over HTTP) on exactly one address, in a thread."""

    daemon_threads = True
    request_queue_size = 128
    """Ranks that may connect at once; with the default of 5, others would retry after 1 s, or 3 s."""
    _handler = RendezvousHandler

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), self._handler, False)
        self._thread = threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        """Binds without a DNS lookup of the host's full name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def set_all_arrived(self) -> None:
        """Sets the key that the other ranks poll: all ranks have arrived."""
        with self.cache_lock:
            self.cache.setdefault(ARRIVALS, {})[ALL_ARRIVED] = b"open"

    def missing(self, world_size: int) -> list[int]:
        """Ranks that have not announced themselves yet."""
        with self.cache_lock:
            arrived = self.cache.get(ARRIVALS, {})
            return [rank for rank in range(1, world_size) if str(rank) not in arrived]

    def stop(self) -> None:
        """Stops the server and its thread."""
        self.shutdown()
        self.server_close()
        self._thread.join()


class _RelayHandler(RendezvousHandler):
    """Handler of a relay, which keeps no values and so has none to delete."""

    server: RendezvousRelay

    def _get_value(self, scope: str, key: str) -> bytes | None:
        return self.server.read(f"/{scope}/{key}")

    def _put_value(self, scope: str, key: str, value: bytes) -> None:
        self.server.write(f"/{scope}/{key}", value)

    def do_DELETE(self) -> None:
        self.send_status_code(HTTPStatus.OK)


class RendezvousRelay(RendezvousServer):
    """Rendezvous server whose values are elsewhere."""

    _handler = _RelayHandler

    def read(self, path: str) -> bytes | None:
        """Value at `/SCOPE/KEY`; None: there is none yet. On any thread."""
        raise NotImplementedError

    def write(self, path: str, value: bytes) -> None:
        """Sets the value at `/SCOPE/KEY`. On any thread."""
        raise NotImplementedError


def _probe_rendezvous() -> None:
    server = RendezvousServer("127.0.0.1", 0)

    def request_status(method: str, key: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
        try:
            connection.request(method, f"/{ARRIVALS}/{key}", body=b"here")
            return connection.getresponse().status
        finally:
            connection.close()

    try:
        require(server.missing(2) == [1], "a rank is missing until it has announced itself")
        require(
            request_status("GET", ALL_ARRIVED) == HTTPStatus.NOT_FOUND,
            "no arrival of all ranks at first",
        )
        require(request_status("PUT", "1") == HTTPStatus.OK, "a rank can announce itself")
        require(server.missing(2) == [], "a rank that has announced itself is not missing")
        server.set_all_arrived()
        require(
            request_status("GET", ALL_ARRIVED) == HTTPStatus.OK,
            "the arrival of all ranks is readable",
        )
    finally:
        server.stop()


class ParameterStub:
    """The attributes of an optimizer that Horovod's wrapper reads; a real one takes seconds to import."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups


def set_compression(optimizer: Any, compression: Any) -> None:
    """Changes the compression of a `DistributedOptimizer`, which otherwise only its constructor sets."""
    optimizer._compression = compression


def set_backward_passes(optimizer: Any, count: int) -> None:
    """Sets `backward_passes_per_step` of a `DistributedOptimizer`, without a reset of running all-reduces."""
    optimizer.backward_passes_per_step = count


def _probe_optimizer() -> None:
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


def replace_libraries(
    framework: str, basics_of: Callable[[Any], Any], operations_of: Callable[[Any], Any]
) -> None:
    """Puts stand-ins in the place of Horovod's compiled libraries.

    Args:
        framework: `torch` or `tensorflow`.
        basics_of: Makes the stand-in for the library that tells ranks and sizes, from that library.
        operations_of: Makes the stand-in for the framework's operations, from these.
    """
    module = importlib.import_module(f"horovod.{framework}.mpi_ops")
    module._basics.MPI_LIB_CTYPES = basics_of(module._basics.MPI_LIB_CTYPES)
    name = _OPERATIONS[framework]
    setattr(module, name, operations_of(getattr(module, name)))


def probes(framework: str, built: Mapping[str, bool]) -> tuple[PrivateApiProbe, ...]:
    """Probes of the undocumented parts used with a framework; they need a running Horovod.

    Args:
        framework: `torch` or `tensorflow`.
        built: Whether Horovod says it was built with a collective, by the collective's name.
    """

    def probe_library() -> None:
        build = build_info.installed(framework)
        assert build is not None
        assert build.extension is not None
        for name, is_built in built.items():
            require(
                build_info.has_collective(build.extension, name) == is_built, f"{name}: {is_built}"
            )

    def probe_operations() -> None:
        module = importlib.import_module(f"horovod.{framework}.mpi_ops")
        require(hasattr(module._basics, "MPI_LIB_CTYPES"), "ranks by `_basics.MPI_LIB_CTYPES`")
        name = _OPERATIONS[framework]
        require(hasattr(module, name), f"operations in `{name}`")

    optimizer_probe = PrivateApiProbe("torch.DistributedOptimizer", _probe_optimizer)
    return (
        PrivateApiProbe("runner.http.http_server", _probe_rendezvous),
        PrivateApiProbe("the class names in its library", probe_library),
        PrivateApiProbe(f"{framework}.mpi_ops", probe_operations),
        *((optimizer_probe,) if framework == "torch" else ()),
    )
