"""One of the updates that a step does: its replica group, gradients, learning rates and momentum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from isotrain.core.contracts.backend.capabilities import Capability
from isotrain.core.contracts.backend.group_protocols import GradientNormGroup
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.contracts.strategy import require_backend_step
from isotrain.core.data.batch import Batch
from isotrain.core.errors import IsotrainError, SpecError, UnsupportedError
from isotrain.core.quantities import counted
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.global_gradients import GlobalGradients
from isotrain.core.session.training.lr_schedule import LearningRates
from isotrain.core.session.training.skipped_steps import StepSkipper
from isotrain.core.session.training.trainer_state import TrainerState
from isotrain.core.spec.initial_weights import matches
from isotrain.core.spec.optimizers import CustomOptimizer
from isotrain.core.spec.schedules import ConstantSchedule
from isotrain.core.spec.training_spec import TrainingSpec


class WeightUpdate:
    """Update of the weights of a group by their objective and optimizer, at the rates of their schedule.

    Attributes:
        name: Name of the update in the spec; empty in a run without named updates, which has one.
        scheduled_rates: Learning rates of its spec, without what the session changed.
    """

    def __init__(
        self,
        name: str,
        spec: TrainingSpec,
        session_context: SessionContext,
        trainer_state: TrainerState,
        reporter: Reporter,
    ) -> None:
        """Reads schedule and gradients of the update from its spec.

        Raises:
            SpecError: Spec and optimizer both set the learning rate or the momentum.
            UnsupportedError: The schedule sets a momentum that the optimizer cannot change.
        """
        plan = session_context.plan
        self.name = name
        self._spec = spec
        self._group = group = session_context.group.updates[name]
        self._strategy = session_context.strategy
        self._trainer_state = trainer_state
        self.scheduled_rates = LearningRates(
            spec,
            group.optimizer_lr_schedule(),
            global_batch_size=plan.global_batch_size,
            steps_per_epoch=trainer_state.steps_per_epoch,
            total_steps=trainer_state.total_steps,
        )
        self._require_one_source_of_rates()
        if group.needs_closure():
            require_backend_step(self._strategy, "optimizer.custom: its step needs a closure")
            if spec.gradients is not None or spec.on_nan == "skip" or spec.reproducible:
                raise SpecError(
                    "optimizer.custom: its step needs a closure, and so takes no gradients that `gradients`,"
                    " `on_nan: skip` or `reproducible` have computed. Leave these out, or use another"
                    " optimizer."
                )
        self._gradients = GlobalGradients(spec, session_context, reporter)
        self._skipper = (
            StepSkipper(name, group, trainer_state, reporter) if spec.on_nan == "skip" else None
        )
        self._set_momentum = self._momentum_setter(plan.backend)
        self._group_schedules = spec.optimizer.group_schedules
        self.set_group_rates(0)  # refused here if the backend has none
        self._norm_group = self._measuring_group(plan.replicas)
        self._norm_names: list[str] = []
        if self._norm_group is not None:
            self._norm_group.keep_gradient_norms(self._norm_parts())

    def _measuring_group(self, replicas: int) -> GradientNormGroup | None:
        """The group, if it measures gradients: if the spec asks for it, or where clipping does so anyway."""
        spec, group, strategy = self._spec, self._group, self._strategy
        if spec.gradient_norm is not None:
            return require(group, GradientNormGroup) if spec.gradient_norm else None
        is_clipped = spec.clip is not None and spec.clip.global_norm is not None
        is_replicated = strategy.parallel_layout.for_replicas(replicas).name == "replicated"
        is_whole = is_replicated and strategy.requires == {Capability.SYNCHRONOUS_STEP}
        if is_clipped and is_whole and isinstance(group, GradientNormGroup):
            return group
        return None

    def _require_one_source_of_rates(self) -> None:
        """Refuses a schedule or scaling in the spec beside the optimizer's own learning-rate scheduler.

        Raises:
            SpecError: The spec has one.
        """
        spec = self._spec
        peak = self.scheduled_rates.peak
        is_constant = spec.schedule == ConstantSchedule() and peak == spec.optimizer.lr
        if not is_constant and self._group.optimizer_rates() is not None:
            raise SpecError(
                "optimizer.custom: its learning-rate scheduler sets the rates, and so do schedule and"
                " scaling. Leave one of the two out."
            )

    def _momentum_setter(self, backend: str) -> Callable[[float], None] | None:
        """Function that sets the momentum, if the schedule changes it; else None.

        Raises:
            UnsupportedError: The momentum of the optimizer cannot change within a run.
        """
        spec = self._spec
        if self.scheduled_rates.momentum(0) is None:
            return None
        set_momentum = self._group.momentum_setter()
        if set_momentum is None:
            raise UnsupportedError(
                f"schedule: {spec.schedule.name} changes the momentum, and that of optimizer"
                f" {spec.optimizer.name} cannot change within a run on {backend}. Leave momentum_range out,"
                " or give the optimizer a momentum."
            )
        return set_momentum

    def rate(self, step: int) -> float:
        """Learning rate by spec and session; `step` counts from 0 over the whole run. Local."""
        return self._trainer_state.rate(self.scheduled_rates(step), self.name)

    def known_rate(self, step: int, group: int | None = None) -> float:
        """Learning rate of a step, by the spec or by the optimizer, as `Session.learning_rate`. Local."""
        if group is not None:
            return self._group_rate(step, group)
        if (optimizer_rates := self._group.optimizer_rates()) is None:
            return self.rate(step)
        steps_done = self._trainer_state.steps_done
        rates = dict(zip((steps_done - 1, steps_done), optimizer_rates, strict=True))
        if step not in rates:
            raise IsotrainError(
                f"learning_rate: the optimizer sets its rates itself, and that of step {step} is not known:"
                f" after {counted(steps_done, 'step')}, those of the last and the next one are."
            )
        return rates[step]

    def _group_rate(self, step: int, group: int) -> float:
        """Learning rate of an optimizer group, with its `lr_factor`.

        Raises:
            IsotrainError: The optimizer has no group of that index.
        """
        groups = self._spec.optimizer.groups
        if group not in range(len(groups)):
            raise IsotrainError(
                f"learning_rate: expected the index of one of {len(groups)} optimizer.groups, received"
                f" {group!r}."
            )
        rate = self.group_rates(step).get(group)
        return (self.rate(step) if rate is None else rate) * groups[group].lr_factor

    def group_scalars(self, step: int) -> dict[str, float]:
        """Rates of optimizer groups with a schedule of their own, by the names of their records. Local."""
        if not self._group_schedules:
            return {}
        groups = self._spec.optimizer.groups
        return {
            self.scalar_name(f"learning_rate_group_{index}"): rate * groups[index].lr_factor
            for index, rate in self.group_rates(step).items()
        }

    def last_rate(self, scheduled: float) -> float:
        """Learning rate of the last step: the optimizer's, if it sets its rates itself. Local."""
        if not isinstance(self._spec.optimizer, CustomOptimizer):
            return scheduled
        optimizer_rates = self._group.optimizer_rates()
        return scheduled if optimizer_rates is None else optimizer_rates[0]

    def group_rates(self, step: int) -> dict[int, float]:
        """Rates of a step for optimizer groups with a schedule, by index, before their `lr_factor`. Local."""
        scheduled = self.scheduled_rates.of_groups(step)
        return {index: self._trainer_state.rate(each, None) for index, each in scheduled.items()}

    def prepare(self, step: int) -> None:
        """Sets what schedules change beside the learning rate of a step. Local."""
        if self._set_momentum is not None:
            self._set_momentum(self.scheduled_rates.momentum(step) or 0.0)
        self.set_group_rates(step)

    def set_group_rates(self, step: int) -> None:
        """Sets the rates of optimizer groups that have a schedule. Local.

        Raises:
            UnsupportedError: The backend has no such groups.
        """
        if self._group_schedules:
            self._group.set_group_rates(self.group_rates(step))

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Does the update by strategy and spec; returns the mean loss of the global batch. Collective."""
        group, gradients = self._group, self._gradients
        if self._skipper is None and not gradients.are_computed_here:
            return self._strategy.step(group, batch, rate)
        means, loss = self.gradients(batch)
        self.apply_gradients(batch, means, loss, rate)
        return loss

    def gradients(self, batch: Batch) -> tuple[list[list[Tensor]], Tensor]:
        """Mean gradients over the global batch, and its loss, as `Session.gradients`. Collective."""
        if self._skipper is not None:
            self._skipper.begin(batch.step)
        return self._gradients.of(self._group, batch)

    def apply_gradients(
        self, batch: Batch, gradients: Sequence[Sequence[Tensor]], loss: Tensor, rate: float
    ) -> None:
        """Does the update with mean gradients, unless they or the loss are to be skipped. Collective."""
        if self._skipper is None or self._skipper.keeps(gradients, loss, batch.step):
            self._gradients.apply(self._group, gradients, rate)

    def _norm_parts(self) -> list[list[int]]:
        """Indices of the update's weights of each norm of `gradient_norm`; notes the names of all norms."""
        parts = self._spec.gradient_norm_parts
        names = list(self._group.describe_state(("trainable",)))
        indices = {
            part: [index for index, name in enumerate(names) if matches(name, patterns)]
            for part, patterns in parts.items()
        }
        present = [part for part in parts if indices[part]]
        scalars = ["gradient_norm", *(f"gradient_norm_{part}" for part in present)]
        self._norm_names = [self.scalar_name(scalar) for scalar in scalars]
        return [indices[part] for part in present]

    def gradient_norms(self) -> dict[str, Tensor]:
        """Norms of the gradients that were applied last, scalars by the names of their records. Local.

        The norm of all gradients is first; there are none if they are not measured.
        """
        norms = [] if self._norm_group is None else self._norm_group.gradient_norms()
        return dict(zip(self._norm_names, norms, strict=True))

    def scalar_name(self, scalar: str) -> str:
        """Name of a scalar of this update in records; the scalar's own without named updates."""
        return f"{self.name}_{scalar}" if self.name else scalar
