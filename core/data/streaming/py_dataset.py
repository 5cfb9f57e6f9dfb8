"""Reading of a Keras `PyDataset`, whose batches its workers make: threads, or processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from isotrain.core.data.processes.channel import (
    Channel,
    ChannelClosedError,
    Message,
    error_text,
    received_object,
    send_object,
)
from isotrain.core.data.processes.child_process import VARIABLES, ChildProcess, close_all
from isotrain.core.data.sample_seeds import SampleSeeds, seeded
from isotrain.core.errors import DataError
from isotrain.core.system.pickling import Payload, receive

_RECEIVERS = "the processes that make the batches of a PyDataset"
_ADVICE = "in __getitem__, or set use_multiprocessing=False, which makes batches in threads"
_MOST_AHEAD = 64
"""Most requests that are not answered: all fit into a socket's buffer, so sending never waits."""


def is_py_dataset(value: Any) -> bool:
    """Whether the value is a Keras `PyDataset`."""
    return any(kind.__name__ == "PyDataset" for kind in type(value).__mro__)


class PyDatasetReader:
    """Function that starts an epoch of a `PyDataset`: its batches, in its order.

    With `use_multiprocessing`, processes make them. Those of an epoch that is read to its end stay for the
    next one; an epoch that begins beside another has its own. They get the data set at the start of each
    epoch, as it is after `on_epoch_begin`, which only this process calls.

    Attributes:
        seed: Seed of the draws in these processes.
        timeout: Seconds without an answer after which a process counts as lost; None for no limit.
    """

    def __init__(self, dataset: Any) -> None:
        """Keeps the data set; reads nothing."""
        self.seed = 0
        self.timeout: float | None = None
        self._dataset = dataset
        self._busy: list[list[ChildProcess]] = []  # of each epoch that is being read
        self._idle: list[ChildProcess] = []
        self._readings = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the data set alone."""
        return PyDatasetReader, (self._dataset,)

    def __call__(self) -> Iterator[Any]:
        """The batches of the next epoch."""
        dataset, number = self._dataset, self._readings
        self._readings += 1
        count = dataset.num_batches
        positions = itertools.count() if count is None else range(count)
        if hasattr(dataset, "on_epoch_begin"):
            dataset.on_epoch_begin()
        workers = getattr(dataset, "workers", 1)
        if workers > 0 and getattr(dataset, "use_multiprocessing", False):
            yield from self._by_processes(number, positions, workers)
        elif workers > 1:
            ahead = dataset.max_queue_size
            yield from _by_threads(dataset.__getitem__, positions, workers, ahead)
        else:
            yield from map(dataset.__getitem__, positions)
        dataset.on_epoch_end()

    def close(self) -> None:
        """Ends the processes; others start with the next epoch."""
        processes, self._idle = self._idle, []
        for busy in self._busy:
            processes += busy
        close_all(processes)

    def _by_processes(self, reading: int, positions: Iterable[int], count: int) -> Iterator[Any]:
        processes, self._idle = self._idle, []
        if not processes:
            processes = [ChildProcess.spawn(f"{__name__}:serve", VARIABLES) for _ in range(count)]
        self._busy.append(processes)
        ahead = min(self._dataset.max_queue_size, _MOST_AHEAD)
        pending: deque[tuple[int, int]] = deque()  # process and position of each request
        is_complete = False
        try:
            self._send_dataset(processes, reading)
            for number, position in enumerate(positions):
                index = number % count
                with contextlib.suppress(ChannelClosedError):  # seen when its answers are read
                    processes[index].channel.send({"position": position})
                pending.append((index, position))
                if len(pending) > ahead:
                    yield received_object(self._answer(processes, *pending.popleft()))
            while pending:
                yield received_object(self._answer(processes, *pending.popleft()))
            is_complete = True
        finally:
            self._busy = [each for each in self._busy if each is not processes]
            if is_complete and not self._idle:
                self._idle = processes
            else:  # they have made batches that nobody takes, or there are others for the next epoch
                close_all(processes)

    def _send_dataset(self, processes: list[ChildProcess], reading: int) -> None:
        """Gives the data set to all processes; large arrays are in memory once."""
        payload = Payload({"data": self._dataset}, None, _RECEIVERS, _ADVICE)
        with contextlib.closing(payload):
            header = {"payload": payload.descriptor, "start": payload.append_stream()}
            header |= {"seed": self.seed, "reading": reading}
            for process in processes:
                with contextlib.suppress(ChannelClosedError):
                    process.channel.send(header)
            for index in range(len(processes)):
                self._answer(processes, index)

    def _answer(
        self, processes: list[ChildProcess], index: int, position: int | None = None
    ) -> Message:
        """Waits for what a process answers next.

        Raises:
            DataError: It has raised an error, has ended, or takes too long.
        """
        process = processes[index]
        task = "load a PyDataset" if position is None else f"make batch {position} of a PyDataset"
        name = (
            f"data: process {index} of {len(processes)} (pid {process.pid}), which was to {task},"
        )
        try:
            message = process.channel.receive(self.timeout)
        except ChannelClosedError as error:
            raise DataError(f"{name} {process.describe_end()}.") from error
        if message is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            raise DataError(
                f"{name} has not answered for {self.timeout:g} s (0.81 of timeouts.progress); its stack is in"
                " the log of the rank that reads the data set."
            )
        if (text := message.header.get("error")) is not None:
            raise DataError(text)
        return message


def serve(channel: Channel) -> None:
    """Makes the batches that are requested, until the channel is closed.

    The global random generators are seeded for each batch, so that their numbers do not depend on which
    process makes it.
    """
    dataset: Any = None
    seed = reading = 0
    with contextlib.suppress(ChannelClosedError):
        while (message := channel.receive()) is not None:
            header = message.header
            try:
                if "payload" in header:
                    seed, reading = header["seed"], header["reading"]
                    dataset = _loaded(header)
                    channel.send({})
                    continue
                position = header["position"]
                with seeded(SampleSeeds(seed, reading, np.array([position]))):
                    batch = dataset[position]
                send_object(channel, {}, batch)
                del batch
            except ChannelClosedError:
                raise
            except Exception as error:  # user code may raise anything
                channel.send({"error": error_text(error, "a process that makes batches")})


def _loaded(header: dict[str, Any]) -> Any:
    """The data set of a `Payload` of the process that has started this one."""
    with open(f"/proc/{os.getppid()}/fd/{header['payload']}", "rb") as stream:
        stream.seek(header["start"])
        return receive(stream, stream.fileno())["data"]


def _by_threads(
    make: Callable[[int], Any], positions: Iterable[int], threads: int, ahead: int
) -> Iterator[Any]:
    """Results of a function for each position, in order, of which threads make some ahead."""
    pending: deque[Future[Any]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for position in positions:
            pending.append(pool.submit(make, position))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
