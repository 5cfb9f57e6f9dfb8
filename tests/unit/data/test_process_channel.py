"""Channels between processes: JSON values, and arrays in memory that both have."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from unit.data import worker_programs
from unit.data.worker_programs import named_mappings, shared_mappings

from isotrain.core.data.processes.channel import Channel, ChannelClosedError, Message
from isotrain.core.data.processes.child_process import ChildProcess, close_all
from isotrain.core.errors import DataError

Start = Callable[[str], ChildProcess]


@pytest.fixture(params=["spawn", "fork"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts processes by the name of what they do, and ends them after the test."""
    children = []

    def start(program: str) -> ChildProcess:
        if request.param == "spawn":
            child = ChildProcess.spawn(f"unit.data.worker_programs:{program}", {})
        else:
            child = ChildProcess.fork(getattr(worker_programs, program))
        children.append(child)
        return child

    yield start
    close_all(children)


def receive(channel: Channel) -> Message:
    message = channel.receive()
    assert message is not None
    return message


def test_values_and_arrays_of_all_kinds_arrive(start: Start) -> None:
    child = start("echo")
    arrays = [
        np.arange(100_000, dtype=np.float64)[::2],
        np.ones((3, 0, 2), np.uint8),
        np.array(7, np.int16),
        np.array([True, False]),
        np.asfortranarray(np.arange(20_000, dtype=np.float32).reshape(100, 200)),
        np.array(["a", "bcd"]),
    ]
    child.channel.send({"text": "é", "numbers": [1, None]}, arrays)
    message = receive(child.channel)
    assert message.header == {
        "pid": child.pid,
        "header": {"text": "é", "numbers": [1, None]},
    }
    for sent, received in zip(arrays, message.arrays, strict=True):
        assert received.dtype == sent.dtype
        np.testing.assert_array_equal(received, sent)
        assert received.flags.writeable


def test_messages_larger_than_the_buffers_of_a_socket(start: Start) -> None:
    channel = start("echo").channel
    channel.send({"text": "x" * 2_000_000})
    assert receive(channel).header["header"] == {"text": "x" * 2_000_000}


def test_memory_is_used_again_when_nothing_refers_to_it(start: Start) -> None:
    child = start("echo")

    def echo(value: int, size: int = 50_000) -> np.ndarray:
        child.channel.send({}, [np.full(size, value)])
        (array,) = receive(child.channel).arrays
        return array

    kept = echo(1)[:10][::2].reshape(5, 1)  # a view of views keeps the memory
    mapped = shared_mappings()
    second = echo(2)
    assert shared_mappings() > mapped  # another block
    address = second.ctypes.data
    del second
    mapped = shared_mappings(child.pid)
    for value in range(3, 20):
        third = echo(value)
        assert (third == value).all()
        del third
    assert echo(20).ctypes.data == address
    assert shared_mappings(child.pid) == mapped
    larger = echo(21, 80_000)
    assert (larger == 21).all()
    assert (kept == 1).all()


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    """Both ends of a channel, after a message of 400,000 bytes from the first to the second."""
    here, there = Channel.pair()
    here.send({}, [np.zeros(50_000)])
    receive(there)
    yield here, there
    here.close()
    there.close()


FLOAT = np.dtype(float)


def test_arrays_made_in_a_draft_are_sent_without_a_copy(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    allocate = here.draft()
    made, larger, gaps = allocate((40_000,), FLOAT), allocate((50_000,), FLOAT), np.arange(8)[::2]
    made[:] = 1.0
    here.send({}, [gaps, made, np.empty((0, 3))])
    received = receive(there).arrays
    assert received[0].tolist() == [0, 2, 4, 6]
    assert received[2].shape == (0, 3)
    made[:], larger[:] = 3.0, 4.0
    assert (received[1] == 3.0).all()
    here.send({}, [larger, np.ones(2)])  # it has memory of its own, and no draft
    assert [float(array[1]) for array in receive(there).arrays] == [4.0, 1.0]


def test_an_array_that_is_sent_twice_is_received_as_two(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    for _ in range(2):  # without a draft, and with one
        made = here.draft()((40_000,), FLOAT)
        made[:] = 1.0
        here.send({}, [made, made, made[100:]])
        first, second, part = receive(there).arrays
        first[:], part[:] = 2.0, 3.0
        assert (first == 2.0).all()
        assert (second == 1.0).all()


def test_more_than_fits_a_draft_is_copied_to_another_block(pair: tuple[Channel, Channel]) -> None:
    here, there = pair
    made = here.draft()((40_000,), FLOAT)
    made[:] = 1.0
    here.send({}, [made, np.full(20_000, 2.0)])
    first, second = receive(there).arrays
    made[:] = 3.0
    assert (first == 1.0).all()
    assert (second == 2.0).all()


def test_a_draft_that_is_still_referred_to_is_not_written_again(
    pair: tuple[Channel, Channel],
) -> None:
    here, there = pair

    def send(array: np.ndarray) -> None:
        here.send({}, [array])
        assert (receive(there).arrays[0] == array).all()
        there.send({})  # says that the memory is free again
        receive(here)

    kept = here.draft()((50_000,), FLOAT)
    kept[:] = 1.0
    send(kept)
    unsent = here.draft()((50_000,), FLOAT)
    unsent[:] = 2.0
    here.draft()  # as after an error
    for value in range(3, 9):
        send(np.full(50_000, value))
    assert (kept == 1.0).all()
    assert (unsent == 2.0).all()
    del kept, unsent
    send(np.zeros(50_000))
    mapped = shared_mappings()
    for value in range(9):
        made = here.draft()((50_000,), FLOAT)
        made[:] = value
        send(made)
        del made
    assert shared_mappings() == mapped


def test_arrays_stay_valid_after_the_sender_is_gone(start: Start) -> None:
    child = start("echo")
    child.channel.send({}, [np.full(50_000, 3.0)])
    (array,) = receive(child.channel).arrays
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ChannelClosedError):
        child.channel.receive()
    assert child.describe_end().startswith("was ended by SIGKILL")
    assert (array == 3.0).all()


def test_the_memory_has_no_name_and_goes_with_the_last_process(start: Start) -> None:
    named, mapped = named_mappings(), shared_mappings()
    child = start("echo")
    child.channel.send({}, [np.zeros(50_000)])
    message = receive(child.channel)
    assert shared_mappings() > mapped
    assert named_mappings() == named
    assert named_mappings(child.pid) <= named  # those of a fork are mapped there too
    os.kill(child.pid, signal.SIGKILL)
    child.close()
    assert (message.arrays[0] == 0).all()
    del message
    assert shared_mappings() == mapped


def test_an_idle_process_ends_with_its_channel(start: Start) -> None:
    child = start("echo")
    child.channel.send({})
    receive(child.channel)
    child.close()
    child.close()
    assert not os.path.exists(f"/proc/{child.pid}")


@pytest.mark.parametrize("program", ["spin", "sleep"])
def test_a_busy_process_is_killed(start: Start, program: str) -> None:
    child = start(program)
    child.channel.send({})
    child.close()
    assert not os.path.exists(f"/proc/{child.pid}")


def test_a_process_that_raises_shows_its_traceback(
    start: Start, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # its channel closes before its exit code is there: a moment later, or more on a busy machine
    monkeypatch.setattr("isotrain.core.data.processes.child_process._END_SECONDS", 60.0)
    child = start("fail")
    with pytest.raises(ChannelClosedError):
        child.channel.receive()
    assert child.describe_end() == "ended with exit code 1 before its work was done"
    assert "RuntimeError: out of luck" in capfd.readouterr().err


def test_nothing_outlives_a_process_that_is_killed(start: Start) -> None:
    child = start("grandparent")
    busy = receive(child.channel).header["pid"]
    descriptor = os.pidfd_open(busy)
    os.kill(child.pid, signal.SIGKILL)
    wait_for_end(descriptor)


def wait_for_end(descriptor: int) -> None:
    """Waits for the end of a process; the test's time-out is the limit."""
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.close(descriptor)


def test_a_process_does_not_end_with_the_thread_that_started_it() -> None:
    started: list[ChildProcess] = []
    thread = threading.Thread(
        target=lambda: started.append(ChildProcess.spawn("unit.data.worker_programs:echo", {}))
    )
    thread.start()
    thread.join()
    child = started[0]
    for _ in range(2):
        child.channel.send({})
        assert receive(child.channel).header["pid"] == child.pid
    child.close()


def test_ctrl_c_does_not_end_a_process(start: Start) -> None:
    child = start("echo")
    child.channel.send({})
    receive(child.channel)
    os.kill(child.pid, signal.SIGINT)
    child.channel.send({"after": 1})
    assert receive(child.channel).header["header"] == {"after": 1}


def test_waiting_has_a_limit() -> None:
    here, there = Channel.pair()
    began = time.monotonic()
    assert here.receive(0.01) is None
    assert time.monotonic() - began >= 0.01
    there.close()
    with pytest.raises(ChannelClosedError):
        here.receive(0.01)
    with pytest.raises(ChannelClosedError):
        here.send({})
    here.close()


def test_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = Channel.pair()

    def allocate(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(
            DataError, match=r"no memory for 0\.8 MiB .*No space left.*loader.workers"
        ):
            here.send({}, [np.zeros(100_000)])
    here.send({}, [np.ones(100_000)])  # later there may be
    assert (receive(there).arrays[0] == 1).all()
    here.close()
    there.close()
