"""Freezing of weights within a run: `session.freeze` and `session.unfreeze`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from isotrain.core.contracts.backend.group_protocols import FreezingGroup
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.strategy import require_backend_step
from isotrain.core.errors import IsotrainError, UnsupportedError, first_of
from isotrain.core.session.training.context import SessionContext
from isotrain.core.session.training.trainer_state import TrainerState
from isotrain.core.spec.initial_weights import matches, patterns_of

_MAX_LISTED = 10


class WeightFreezer:
    """Freezes weights of a session's model, and unfreezes them. Collective."""

    def __init__(self, session_context: SessionContext, trainer_state: TrainerState) -> None:
        self._context = session_context
        self._trainer_state = trainer_state

    def freeze(self, patterns: str | Sequence[str]) -> None:
        """Freezes the weights that patterns match, as `Session.freeze`."""
        names = self._matched("freeze", patterns)
        self.set_frozen({*self._trainer_state.frozen, *names})

    def unfreeze(self, patterns: str | Sequence[str]) -> None:
        """Unfreezes the weights that patterns match, as `Session.unfreeze`."""
        names = self._matched("unfreeze", patterns)
        spec = self._context.spec
        if fixed := [name for name in names if spec.is_frozen(name)]:
            raise IsotrainError(
                f"session.unfreeze: {first_of(fixed, _MAX_LISTED)}: frozen by initial_weights.freeze, for the"
                " whole run. Freeze what you will unfreeze by session.freeze, before the first step."
            )
        self.set_frozen(set(self._trainer_state.frozen).difference(names))

    def _matched(self, call: str, patterns: str | Sequence[str]) -> list[str]:
        """Names of the weights that patterns match.

        Raises:
            IsotrainError: A pattern matches no weight.
        """
        names = list(self._context.group.describe_state(("trainable", "non-trainable")))
        for pattern in patterns_of(patterns):
            if not any(matches(name, [pattern]) for name in names):
                raise IsotrainError(
                    f"session.{call}: {pattern!r} fits none of the names: {', '.join(sorted(names))}."
                )
        return [name for name in names if matches(name, patterns_of(patterns))]

    def set_frozen(self, names: Collection[str]) -> None:
        """Freezes exactly these weights from the next step on, besides those that the spec freezes.

        Raises:
            IsotrainError: No trainable weight is left.
            UnsupportedError: The spec, the strategy or the backend cannot do it.
        """
        frozen, group = sorted(names), self._context.group
        if frozen == self._trainer_state.frozen:
            return
        if self._context.spec.updates:
            raise UnsupportedError(
                "session.freeze: the spec has updates, of which each trains its weights. Let the loop choose"
                ' between them: session.step(batch, "head").'
            )
        require_backend_step(self._context.strategy, "session.freeze")
        if group.weight_finalizer() is not None:
            raise UnsupportedError(
                "session.freeze: optimizer.custom: use_ema: Keras averages all weights at once. Leave it out,"
                " and give the spec `ema`."
            )
        if names and not set(group.describe_state(("trainable",))).difference(names):
            raise IsotrainError("session.freeze: every weight is frozen; nothing is left to train.")
        require(group, FreezingGroup).set_frozen(frozen)
        self._trainer_state.frozen = frozen
