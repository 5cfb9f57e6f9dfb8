"""Sends in the background keep their order to each process, and their errors come up."""

from __future__ import annotations

import threading

import pytest

from isotrain.adapters.common.pipeline.background_sends import BackgroundSends


def test_a_send_that_waits_holds_up_only_those_to_the_same_process() -> None:
    sends, received, sent = BackgroundSends(), threading.Event(), list[str]()
    other_sent = threading.Event()

    def waiting() -> None:
        received.wait()
        sent.append("first")

    sends.start(1, waiting)
    sends.start(1, lambda: sent.append("second"))
    sends.start(2, other_sent.set)
    other_sent.wait()
    sends.check()
    assert sent == []
    received.set()
    sends.wait()
    assert sent == ["first", "second"]
    sends.close()


def test_a_send_that_fails_is_told_and_ends_the_others() -> None:
    sends, sent = BackgroundSends(), list[str]()

    def failing() -> None:
        raise ConnectionError("lost")

    sends.start(1, failing)
    sends.start(1, lambda: sent.append("second"))
    with pytest.raises(ConnectionError, match="lost"):
        sends.wait()
    with pytest.raises(ConnectionError, match="lost"):
        sends.check()
    assert sent == []
    sends.close()
