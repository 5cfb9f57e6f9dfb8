"""Learning rates and momentum of a torch optimizer's parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from isotrain.plugin import SpecError


class ParamGroupRates:
    """Scales the learning rate of each parameter group, and notices if the optimizer sets rates itself.

    Attributes:
        are_scheduled: Whether a scheduler of `torch.optim.lr_scheduler` is attached and sets the rates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr: float,
        factors: Sequence[float] | None,
        schedules: Sequence[int | None] = (),
    ) -> None:
        """Reads the rates of the groups.

        Args:
            optimizer: Optimizer whose groups are scaled.
            lr: Learning rate of the spec, which the optimizer was created with.
            factors: Ratio of each group's rate to `lr`; None for a custom optimizer: the ratios are those of
                its rates, which are compared in each update, as it may set them itself.
            schedules: Key of each group's rate in `set_scheduled`; None for groups whose rate `set` sets.
        """
        self._groups = optimizer.param_groups
        self._lr = lr
        self._expected = self._rates()
        self._ratios = [rate / lr for rate in self._expected] if factors is None else factors
        self._schedules = schedules or [None] * len(self._groups)
        self._rate = lr
        self._latest = self._expected
        self.are_scheduled = any("initial_lr" in group for group in self._groups)
        self._is_set_elsewhere = self.are_scheduled
        if factors is None:
            optimizer.register_step_pre_hook(self._compare)  # after the user's own hooks

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups]  # some are tensors

    def set(self, rate: float) -> None:
        """Sets the learning rate of the following updates.

        Raises:
            SpecError: The optimizer sets rates itself, and would overwrite this one.
        """
        self._is_set_elsewhere = self._is_set_elsewhere or self._rates() != self._expected
        self._rate = rate
        if self._is_set_elsewhere:
            self._require_spec_rate()
            return
        self._set_groups({None: rate})

    def set_scheduled(self, rates: Mapping[int, float]) -> None:
        """Sets the learning rates of the groups with a schedule, by its key."""
        self._set_groups(rates)

    def _set_groups(self, rates: Mapping[Any, float]) -> None:
        """Sets the learning rates of the groups whose schedules are keys."""
        for group, ratio, schedule in zip(self._groups, self._ratios, self._schedules, strict=True):
            if schedule not in rates:
                continue
            rate = rates[schedule]
            if torch.is_tensor(group["lr"]):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio
        self._expected = self._rates()

    def _compare(self, *hook_arguments: Any) -> None:
        """Step pre-hook: notes the rates that the update uses, and compares them with the expected ones."""
        self._latest = self._rates()
        if not self._is_set_elsewhere and self._latest != self._expected:
            self._is_set_elsewhere = True
            self._require_spec_rate()

    def _require_spec_rate(self) -> None:
        """Checks that the run leaves the rate at that of the spec, as the optimizer sets rates itself."""
        if self._rate != self._lr:
            raise SpecError(
                "optimizer.custom: the optimizer sets its learning rate itself (a scheduler, or a hook), and"
                f" the run sets {self._rate} instead of optimizer.lr ({self._lr}). Remove one of the two: the"
                " optimizer's scheduler or hook, or schedule, scaling and session.scale_learning_rate."
            )

    def by_optimizer(self) -> tuple[float, float] | None:
        """Rate of the first group in the last update, and now; None if only `set` has set rates."""
        self._is_set_elsewhere = self._is_set_elsewhere or self._rates() != self._expected
        return (self._latest[0], self._rates()[0]) if self._is_set_elsewhere else None


def momentum_setter(optimizer: torch.optim.Optimizer) -> Callable[[float], None] | None:
    """Function that sets the momentum of all groups, or the first of their `betas`; None without any."""
    groups = optimizer.param_groups

    def set_momentum(momentum: float) -> None:
        for group in groups:
            group["momentum"] = momentum

    def set_first_beta(momentum: float) -> None:
        for group in groups:
            group["betas"] = (momentum, *group["betas"][1:])

    if all(group.get("momentum") for group in groups):
        return set_momentum
    return set_first_beta if all("betas" in group for group in groups) else None
