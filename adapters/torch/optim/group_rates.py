"""The learning rates of a torch optimizer's groups, which a person's own optimizer may set itself."""

from __future__ import annotations

from typing import Any

import torch

from isotrain.plugin import SpecError


class ParamGroupRates:
    """Sets the rate of each group in proportion to what it was made with, and notices who else does.

    Attributes:
        are_scheduled: Whether one of torch's schedulers is attached: it sets the rates, and nobody else.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, lr: float, *, watched: bool) -> None:
        """Takes the rates that the groups have.

        Args:
            optimizer: Whose.
            lr: The rate that it was made for.
            watched: Whether it may set rates itself: these are then looked at in each update.
        """
        self._groups = optimizer.param_groups
        self._lr = lr
        self._given = self._rates()
        self._ratios = [rate / lr for rate in self._given]
        self._rate = lr
        self._latest = self._given
        self.are_scheduled = any("initial_lr" in group for group in self._groups)
        self._moved = self.are_scheduled
        if watched:
            optimizer.register_step_pre_hook(self._look)  # after the person's own

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups]  # some are tensors

    def set(self, rate: float) -> None:
        """Makes it the rate of the following updates.

        Raises:
            SpecError: The optimizer sets rates itself, and would lose this one.
        """
        self._moved = self._moved or self._rates() != self._given
        self._rate = rate
        if self._moved:
            self._require_free()
            return
        for group, ratio in zip(self._groups, self._ratios, strict=True):
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio
        self._given = self._rates()

    def _look(self, *update: Any) -> None:
        """Notes the rates that the update which begins uses."""
        self._latest = self._rates()
        if not self._moved and self._latest != self._given:
            self._moved = True
            self._require_free()

    def _require_free(self) -> None:
        if self._rate != self._lr:
            raise SpecError(
                "optimizer.custom: the optimizer sets its learning rate itself (a scheduler, or a hook), and"
                f" the run sets {self._rate} instead of optimizer.lr ({self._lr}). Leave one of the two"
                " out: what the optimizer does, or schedule, scaling and session.scale_learning_rate."
            )

    def by_optimizer(self) -> tuple[float, float] | None:
        """The first group's rate in the last update, and now; None while nobody else has set any."""
        self._moved = self._moved or self._rates() != self._given
        return (self._latest[0], self._rates()[0]) if self._moved else None
