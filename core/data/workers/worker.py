"""The program of a worker process: makes the local batches that its pool requests."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.core.data.arrays import allocating
from isotrain.core.data.fetch import BatchPositions, Fetcher
from isotrain.core.data.processes.channel import Channel, ChannelClosedError, Message
from isotrain.core.data.pytree import encode_tree
from isotrain.core.data.refusals import RefusedError
from isotrain.core.data.worker_settings import WorkerSettings
from isotrain.core.errors import IsotrainError
from isotrain.core.system.pickling import receive

_MOST_CHARACTERS = 8000  # of an error


@dataclass(frozen=True)
class WorkerTask:
    """Task of the workers of a pool.

    Attributes:
        fetcher: Makes local batches.
        settings: Settings of the pool.
    """

    fetcher: Fetcher
    settings: WorkerSettings


def main(channel: Channel, index: int, payload: int, start: int) -> None:
    """Reads the task, and works.

    Args:
        channel: This process's end of the channel to the pool.
        index: Index of the worker in its pool.
        payload: Inherited file descriptor of a `Payload` of the task.
        start: First byte of its stream in that file.
    """
    try:
        with open(f"/proc/self/fd/{payload}", "rb") as stream:  # with a position of its own
            stream.seek(start)
            task = receive(stream, payload)["task"]
    except Exception as error:
        _send_error(channel, error, is_final=True)
    else:
        work(channel, index, task)


def work(channel: Channel, index: int, task: WorkerTask) -> None:
    """Answers requests until the pool closes the channel."""
    try:
        _set_up(index, task)
    except Exception as error:
        _send_error(channel, error, is_final=True)
        return
    checks_seeds = index == 0
    with contextlib.suppress(ChannelClosedError):
        while (message := channel.receive()) is not None:
            _answer(channel, task.fetcher, message, checks_seeds=checks_seeds)
            checks_seeds = False
            del message


def _set_up(index: int, task: WorkerTask) -> None:
    for name in task.settings.imports:
        importlib.import_module(name)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the other cores have workers of their own
    module: Any = sys.modules.get("torch.utils.data._utils.worker")
    if module is not None:  # `torch.utils.data.get_worker_info` tells of this worker
        data = getattr(task.fetcher.source, "data", None)
        module._worker_info = module.WorkerInfo(
            id=index, num_workers=task.settings.count, seed=task.fetcher.seed, dataset=data
        )
    if task.settings.initialize is not None:
        task.settings.initialize(index)


def _answer(channel: Channel, fetcher: Fetcher, message: Message, *, checks_seeds: bool) -> None:
    """Sends the local batch of a request, or the error that making it raises."""
    header, arrays = message.header, list[np.ndarray]()
    fetcher.transform.checks_transform = header["checks_transform"]
    positions = BatchPositions(header["epoch"], header["step"], *message.arrays)
    # A transform may keep what it gets, and the trainer may write to what it receives.
    allocate = np.empty if fetcher.transform.is_given else channel.draft()
    try:
        with allocating(allocate):
            tree = encode_tree(fetcher.fetch(positions), arrays)
        warning = fetcher.unseeded_draws(positions) if checks_seeds else None
        channel.send({"tree": tree, "warning": warning}, arrays)
    except ChannelClosedError:
        raise
    except Exception as error:
        _send_error(channel, error, is_final=False)


def _send_error(channel: Channel, error: Exception, *, is_final: bool) -> None:
    """Sends an error's class, text and traceback, and the arguments of a refusal."""
    is_ours = isinstance(error, IsotrainError)
    text = str(error) if is_ours else "".join(traceback.format_exception_only(error)).strip()
    description = {
        "class": type(error).__name__,
        "text": text[:_MOST_CHARACTERS],
        "is_ours": is_ours,
        "is_final": is_final,
        "refusal": [error.code, error.detail] if isinstance(error, RefusedError) else None,
        "traceback": "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:],
    }
    channel.send({"error": description})
