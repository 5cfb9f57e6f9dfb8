"""Status page of a rank process, as its launcher reads it and writes requests to it."""

from __future__ import annotations

import mmap
import os

from isotrain.core.contracts.membership import Membership
from isotrain.core.contracts.reporter import (
    PAGE_BYTES,
    Status,
    accepts_requests,
    acknowledge,
    allow_exit,
    publish_membership,
    read_status,
    request_checkpoint,
    request_regroup,
    request_stop,
    void_group,
)


class StatusPage:
    """The launcher's end of a process's status page. Memory that both share: no call waits.

    Attributes:
        page_file: Descriptor of the page, for the process's `Reporter`.
    """

    def __init__(self) -> None:
        """Makes an empty page."""
        self.page_file = os.memfd_create("isotrain-status")  # in memory: works on a full disk
        os.truncate(self.page_file, PAGE_BYTES)
        self._page = mmap.mmap(self.page_file, PAGE_BYTES)

    @property
    def status(self) -> Status:
        """Step and current call of the process."""
        return read_status(self._page)

    @property
    def accepts_requests(self) -> bool:
        """Whether the process's training loop looks for requests of checkpoints."""
        return accepts_requests(self._page)

    def request_checkpoint(self, *, and_end: bool) -> None:
        """Requests a checkpoint from the training loop, and with `and_end` the end of the run after it."""
        request_checkpoint(self._page, and_end=and_end)

    def request_stop(self) -> None:
        """Requests that training ends early."""
        request_stop(self._page)

    def allow_exit(self) -> None:
        """Lets the process exit, once all ranks have finished; until then it waits."""
        allow_exit(self._page)

    def acknowledge(self, first: int) -> None:
        """Tells it the first step in the newest `Steps` that was received from rank 0."""
        acknowledge(self._page, first)

    def request_regroup(self) -> None:
        """Requests that it leaves its process group before its next step: a process joins."""
        request_regroup(self._page)

    def void_group(self, generation: int) -> None:
        """Tells it that its process group of a generation has lost a member."""
        void_group(self._page, generation)

    def publish_membership(self, membership: Membership) -> None:
        """Tells it which process group it is to join."""
        publish_membership(self._page, membership.generation, membership.to_bytes())
