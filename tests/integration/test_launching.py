"""A run can be started from anywhere: a script, a module, standard input, a notebook; and several at once."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import isotrain
from isotrain.core.errors import IsotrainError, PlanError, RunFailedError
from isotrain.core.launching.processes.ports import PORTS, Ports
from isotrain.core.system.pickling import Payload, receive
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

pytestmark = pytest.mark.usefixtures("reference")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

BODY = """
import isotrain
import numpy as np
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

SCALE = 2.0

def squared(outputs, targets):
    difference = outputs - targets
    return (difference**2).mean(axis=1), outputs, difference

class Doubling:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, inputs, targets, random):
        return inputs * self.scale, targets

def model():
    return Network([Dense(4, 2)])

def data():
    inputs = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
    return inputs, inputs[:, :2]

def train():
    offset = 0.0
    spec = {
        "name": "from-anywhere",
        "model": model,
        "data": data,
        "transform": Doubling(SCALE),
        "objective": lambda model, batch: squared(model(batch[0]), batch[1] - offset),
        "optimizer": {"name": "sgd", "lr": 0.125},
        "global_batch_size": 8,
        "epochs": 1,
        "plugins": "isotrain.testing.reference",
    }
    result = isotrain.run(spec, backend="reference", replicas=2)
    print("loss", result.final_loss)
"""
GUARDED = BODY + '\nif __name__ == "__main__":\n    train()\n'
UNGUARDED = BODY + "\ntrain()\n"


def python(*arguments: str, folder: Path, stdin: str | None = None) -> str:
    """Runs Python in `folder`; returns its standard output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def from_guarded_script(folder: Path) -> str:
    (folder / "train.py").write_text(GUARDED)
    return python("train.py", folder=folder)


def from_unguarded_script(folder: Path) -> str:
    (folder / "train.py").write_text(UNGUARDED)
    return python("train.py", folder=folder)


def from_package(folder: Path) -> str:
    package = folder / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(BODY)
    (package / "__main__.py").write_text("from mine.parts import train\ntrain()\n")
    return python("-m", "mine", folder=folder)


def from_standard_input(folder: Path) -> str:
    return python("-", folder=folder, stdin=UNGUARDED)


def from_command(folder: Path) -> str:
    return python("-c", UNGUARDED, folder=folder)


def from_notebook(folder: Path) -> str:
    """Talked with over sockets in a folder: a port that it is told may be taken before it listens there."""
    pytest.importorskip("ipykernel", reason="a notebook's kernel is not installed")
    manager = pytest.importorskip("jupyter_client.manager")
    said: list[str] = []

    def hear(message: Any) -> None:
        said.append(message["content"].get("text", "") or str(message["content"]))

    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:  # whose names must be short
        kernel = manager.KernelManager(transport="ipc", ip=f"{sockets}/kernel")
        kernel.start_kernel(cwd=str(folder))
        client = kernel.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=120)
            client.execute_interactive(BODY, timeout=120, output_hook=hear)
            client.execute_interactive("train()", timeout=200, output_hook=hear)
        finally:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)
    return "".join(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        from_guarded_script,
        from_unguarded_script,
        from_package,
        from_standard_input,
        from_command,
        from_notebook,
    ],
)
def test_a_run_starts_from_a_script_notebook_or_pipe(start: Any, tmp_path: Path) -> None:
    assert "loss 0." in start(tmp_path)


@pytest.mark.slow
def test_a_script_that_runs_when_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(UNGUARDED)
    spec = {"model": "careless:model", "data": "careless:data", "loss": "mean_squared_error"}
    spec |= {"optimizer": {"name": "sgd", "lr": 0.1}, "global_batch_size": 8, "epochs": 1}
    spec |= {"plugins": "isotrain.testing.reference"}
    program = f"""
import isotrain
from isotrain.core.errors import RunFailedError
try:
    isotrain.run({spec!r} | {{"name": "careless"}}, backend="reference", replicas=2)
except RunFailedError as error:
    print(error)
"""
    output = python("-c", program, folder=tmp_path)
    assert "a run was started inside of a process that belongs to a run" in output
    assert 'if __name__ == "__main__"' in output


def model() -> Network:
    return Network([Dense(4, 2)])


def spec(**changes: Any) -> dict[str, Any]:
    inputs = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
    fields = {"name": "launching", "model": model, "data": (inputs, inputs[:, :2].copy())}
    fields |= {"loss": "mean_squared_error", "optimizer": {"name": "sgd", "lr": 0.125}}
    return fields | {"global_batch_size": 8, "epochs": 1} | changes


def run(folder: Path, **options: Any) -> isotrain.RunResult:
    return isotrain.run(
        spec(), backend="reference", replicas=2, output=folder, on_event=ignore, **options
    )


def ignore(event: Any) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def occupied_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with occupied_port() as port, pytest.raises(PlanError) as caught:
        run(tmp_path, port=port)
    assert f"port {port} of 127.0.0.1 cannot be used: address already in use" in str(caught.value)
    assert not list(tmp_path.glob("rank-*.log"))


@pytest.mark.parametrize("port", [0, -1, 65535, 70000])
def test_an_impossible_port_is_refused(port: int, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="port: expected 1 to 65534, received"):
        run(tmp_path, port=port)


def test_two_runs_do_not_get_the_same_port() -> None:
    first, second = Ports(), Ports()
    with contextlib.closing(first), contextlib.closing(second):
        (port,) = first.take(1, next(each for each in TOLD if are_free(each, 1)))
        with pytest.raises(PlanError, match="another run has it"):
            second.take(1, port)
    third, fourth = Ports(), Ports()
    with contextlib.closing(third), contextlib.closing(fourth):
        assert third.take(1, port) == (port,)
        third.release(port)
        assert fourth.take(1, port) == (port,)


TOLD = range(PORTS.stop, PORTS.stop + 100, 2)
"""Between the ports that runs take by themselves and those that systems hand out."""


def are_free(first: int, count: int) -> bool:
    """Whether so many ports from the first on are."""
    with contextlib.closing(Ports()) as ports, contextlib.suppress(PlanError):
        return bool(ports.take(count, first))
    return False


def test_two_runs_at_once_and_one_port_twice_in_a_row(tmp_path: Path) -> None:
    losses: list[float] = []

    def start(name: str, **options: Any) -> None:
        losses.append(run(tmp_path / name, **options).final_loss)

    port = next(first for first in TOLD if are_free(first, 2))
    threads = [
        threading.Thread(target=start, args=("a",), kwargs={"port": port}),
        threading.Thread(target=start, args=("b",)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start("c", port=port)
    assert len(losses) == 3
    assert len(set(losses)) == 1


def test_an_unpicklable_argument_is_named(tmp_path: Path) -> None:
    lock = threading.Lock()

    def transform(inputs: Any, targets: Any, random: Any) -> Any:
        with lock:
            return inputs, targets

    with pytest.raises(IsotrainError, match=r"spec\.transform cannot be sent to the processes"):
        isotrain.run(
            spec(transform=transform),
            backend="reference",
            output=tmp_path,
            on_event=ignore,
        )


def test_output_of_rank_0_is_relayed_and_of_others_logged(tmp_path: Path) -> None:
    said: list[str] = []

    def work(session: Any) -> int:
        print("hello", end=" ")
        print("grumbling of", session.rank, file=sys.stderr)
        print("from", session.rank)  # ends the line, which goes out whole
        return os.getpid()

    def hear(event: Any) -> None:
        if event["event"] == "output":
            said.append(event["text"])

    pids = isotrain.launch(
        work, spec(), backend="reference", replicas=2, output=tmp_path, on_event=hear
    )
    assert "".join(said) == "hello from 0\n"
    assert len({*pids, os.getpid()}) == 3
    logs = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    for rank, log in enumerate(logs):
        assert f"hello from {rank}\n" in log
        assert f"grumbling of {rank}\n" in log


def test_large_arrays_are_in_memory_once_and_are_private(tmp_path: Path) -> None:
    inputs = np.arange(1 << 20, dtype="float32").reshape(-1, 4)
    small = np.arange(3)
    with contextlib.closing(Payload({"x": inputs, "same": inputs, "y": small}, tmp_path)) as sent:
        assert len(sent.stream) < 10_000
        received = [_received(sent) for _ in range(2)]
        received[0]["x"][0, 0] = -1.0  # a process may write to what it was given
    assert received[0]["same"] is received[0]["x"]
    assert np.array_equal(received[1]["x"], inputs)
    assert np.array_equal(received[1]["y"], small)
    assert not list(tmp_path.iterdir())


def _received(sent: Payload) -> Any:
    import io

    return receive(io.BytesIO(sent.stream), sent.descriptor)


def test_an_unpicklable_return_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="in call 'save what was returned'") as caught:
        isotrain.launch(
            lambda session: object(),
            spec(),
            backend="reference",
            output=tmp_path,
            on_event=ignore,
        )
    assert "the function returned 'object'" in str(caught.value)
