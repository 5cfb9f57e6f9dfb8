"""Times of forward pass, backward pass, exposed exchange and update of a torch process's steps, on CPUs."""

from __future__ import annotations

import time
from typing import Any

from isotrain.plugin import EXPOSED_EXCHANGE, ActionTimer


class StepTimer(ActionTimer):
    """Times the synchronous steps of a group from now on, by wrapping the calls that they are made of."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._last_gradient = 0.0
        trainer, communicator = group.trainer, group.communicator
        for weight in trainer.trainable.values():
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._gradient_is_ready)
        self.time_calls(group, "_forward", "forward")
        self.time_calls(trainer, "backward", "backward")
        if communicator.replicas > 1:
            self._time_exchange(communicator)
        self.time_calls(group, "_update_weights", "update")

    def _gradient_is_ready(self, _: Any) -> None:
        self._last_gradient = time.perf_counter()

    def _time_exchange(self, communicator: Any) -> None:
        """Times waiting for gradients: DDP waits within the backward pass, once the last one is computed."""
        wait = communicator.wait_gradients

        def wait_gradients() -> None:
            self.move_end(self._last_gradient)
            wait()
            self.end(EXPOSED_EXCHANGE)

        communicator.wait_gradients = wait_gradients
        self.time_calls(communicator, "all_reduce", EXPOSED_EXCHANGE)  # of moving statistics
