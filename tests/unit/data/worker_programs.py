"""What the processes of the tests of channels do."""

import os
import time
from pathlib import Path

from isotrain.core.data.processes.channel import Channel, ChannelClosedError


def echo(channel: Channel) -> None:
    """Sends every message back, with its process id."""
    try:
        while (message := channel.receive()) is not None:
            channel.send({"pid": os.getpid(), "header": message.header}, message.arrays)
            del message
    except ChannelClosedError:
        return


def spin(channel: Channel) -> None:
    """Is busy for ever after the first message."""
    message = channel.receive()
    assert message is not None
    channel.send({"pid": os.getpid()})
    while True:
        pass


def sleep(channel: Channel) -> None:
    """Sleeps for a long time."""
    time.sleep(1000)


def fail(channel: Channel) -> None:
    """Raises."""
    raise RuntimeError("out of luck")


def shared_mappings(pid: int | str = "self") -> int:
    """The number of blocks of shared samples that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:isotrain-samples")


def named_mappings(pid: int | str = "self") -> set[str]:
    """The files in /dev/shm that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}


def grandparent(channel: Channel) -> None:
    """Starts a busy process, tells its process id, and waits."""
    from isotrain.core.data.processes.child_process import ChildProcess

    child = ChildProcess.spawn(f"{__name__}:spin", {})
    child.channel.send({})
    message = child.channel.receive()
    assert message is not None
    channel.send({"pid": message.header["pid"]})
    time.sleep(1000)
