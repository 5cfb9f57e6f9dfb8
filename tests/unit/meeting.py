"""Meetings of a joined run's processes, which are threads here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from isotrain.core.contracts.environment import Place
from isotrain.core.errors import IsotrainError
from isotrain.core.joining.channel import Channel
from isotrain.core.joining.key import RunKey
from isotrain.core.joining.meeting import Chair, Meeting, Member
from isotrain.core.joining.welcome import Welcome, reached
from isotrain.core.launching.ports import Ports
from isotrain.core.served.terms import Terms

LOCAL = "127.0.0.1"
LONG = 30.0
PLAIN = Terms()
Part = Callable[[Meeting], Any]


def place(rank: int, size: int, job: str = "job") -> Place:
    return Place("torchrun", ("RANK",), rank, size, job, host=f"n{rank}")


def key(job: str = "job", number: int = 0, own: bytes = b"own") -> RunKey:
    return RunKey.of(place(0, 2, job), own, number)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with contextlib.closing(Ports()) as ports:
        yield ports.take(1)[0]


def meet(
    parts: Mapping[int, Part],
    size: int,
    *,
    seconds: float = LONG,
    folders: Mapping[int, str] | None = None,
) -> dict[int, Any]:
    """What came of each rank's part, an error too; each on a thread.

    Args:
        parts: By rank; those without one never come.
        size: Of the run.
        seconds: That each step may take.
        folders: By rank, with what it encrypts by; those without one do not.
    """
    found: dict[int, Any] = {}
    terms = {rank: Terms.of((folders or {}).get(rank, "")) for rank in parts}

    def attend(rank: int, port: int) -> None:
        own = key()
        try:
            with contextlib.closing(opened(rank, size, own, port, seconds, terms[rank])) as meeting:
                found[rank] = parts[rank](meeting)
        except IsotrainError as error:
            found[rank] = error

    with free_port() as port:
        threads = [threading.Thread(target=attend, args=(rank, port)) for rank in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


def opened(
    rank: int, size: int, own: RunKey, port: int, seconds: float, terms: Terms = PLAIN
) -> Meeting:
    if rank == 0:
        return Chair(place(0, size), own, seconds, Welcome(LOCAL, [port], own.secret, terms))
    wire = reached(LOCAL, [port], own.secret, rank, seconds, terms)
    return Member(place(rank, size), own, seconds, Channel(wire))


def settling(judge: Any = lambda told: {"ranks": [each["rank"] for each in told]}) -> Part:
    def part(meeting: Meeting) -> Any:
        with meeting.telling():
            rank = meeting.place.rank
            return meeting.settle({"rank": rank, "host": f"n{rank}"}, judge)

    return part
