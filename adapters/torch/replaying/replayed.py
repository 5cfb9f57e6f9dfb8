"""Keras computations that are recorded when they come again, and replayed from then on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch

from isotrain.adapters.torch.metrics import Measured
from isotrain.adapters.torch.replaying.outcome import METRICS_DIFFER, Outcome
from isotrain.adapters.torch.replaying.phase_metrics import PhaseMetrics
from isotrain.adapters.torch.replaying.python_state import PythonState
from isotrain.adapters.torch.replaying.recordable import UnrecordableError
from isotrain.adapters.torch.replaying.recording import UNCOMPILED, Compute, Recording, record
from isotrain.adapters.torch.replaying.rounding import rounded, weights_rounded
from isotrain.adapters.torch.trees import digest, rolled, signature

_CHECKED_AGAIN = 16
"""A record is checked at its first use, and again after this many times as many uses."""
_CHECKED_AFTER = 4096
"""Uses after which it is checked again in any case."""
_SIGNATURES = 16
"""Records that are kept; inputs of further shapes are computed without."""
_UNRECORDED = 2
"""Calls of a signature before the first replay."""
_REFUSED = [0, -1]
_RENEWALS = 8
"""How often a model's own attributes may change before nothing is recorded any more."""


@dataclass
class _Record:
    """The recording for one signature, whether its bits are Keras' own, and how often it was used.

    Attributes:
        next_check: The use at which it is checked next.
        agreed: The use at which it was checked last; 0 before the first.
    """

    recording: Recording
    is_exact: bool
    uses: int = 0
    next_check: int = 1
    agreed: int = 0

    def pass_checks(self) -> None:
        """Lets those lie behind it that belong to its uses so far."""
        while self.next_check <= self.uses:
            self.agreed = self.next_check
            self.next_check += min((_CHECKED_AGAIN - 1) * self.next_check, _CHECKED_AFTER)


class Replayed:
    """A computation of a Keras model, without Keras' Python in most of its calls.

    A signature (the shapes and types of a slice) is computed by Keras when it is met first, recorded when
    it is met again, and replayed from the third time on. The first replay is compared to the computation
    itself on data that the recording has not seen, and so are later ones, ever more seldom.

    Attributes:
        refusal: Why nothing is recorded; None as long as something may be.
        unmeasured: Why metrics are no part of the records; None as long as they may be.
        records: By signature.
        is_paused: Whether it computes without a record for now, and counts nothing.
    """

    def __init__(
        self,
        compute: Compute,
        model: keras.Layer,
        phase: str,
        compiles: bool = False,
        callables: Sequence[Any] = (),
    ) -> None:
        """Records nothing yet.

        Args:
            compute: From inputs and targets to the mean loss and the predictions.
            model: Whose layers it calls.
            phase: `training` or `evaluation`, for messages.
            compiles: Whether records are to be compiled.
            callables: What it calls besides layers that has attributes: losses, an objective.
        """
        self.refusal: str | None = None
        self.unmeasured: str | None = None
        self._compiles = compiles
        self._callables = callables
        self._compute = compute
        self._model = model
        self._phase = phase
        self._variables = [*model.trainable_variables, *model.non_trainable_variables]
        self._parameters = [variable.value for variable in model.trainable_variables]
        self._others = [variable.value for variable in model.non_trainable_variables]
        self._met: set[Any] = set()
        self.records: dict[Any, _Record] = {}
        self._state: PythonState | None = None
        self._renewals = 0
        self._before: dict[int, int] = {}
        self._metrics: PhaseMetrics | None = None
        self.is_paused = False

    def measure(self, metrics: PhaseMetrics) -> None:
        """Makes metrics part of the records, which then give `Measured` in place of predictions."""
        self._metrics = metrics

    def __call__(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Gives the mean loss and the predictions."""
        if self.refusal is not None or self.is_paused:
            return self._compute(inputs, targets)
        key = signature(inputs), signature(targets)
        if self._before:
            self._catch_up(key, inputs, targets)
        known = self.records.get(key)
        if known is None:
            self._meet(key, inputs, targets)
        elif self._state is None or not self._state.is_unchanged:
            self._forget()
        else:
            known.uses += 1
            if known.uses == known.next_check:
                self._check(known, inputs, targets, is_first=known.uses == 1)
                known.pass_checks()
            if key in self.records:
                return known.recording(inputs, targets)
        return self._compute(inputs, targets)

    def _meet(self, key: Any, inputs: Any, targets: Any) -> None:
        """Records a signature when it is met for the second time."""
        if key not in self._met:
            if len(self._met) < _SIGNATURES:
                self._met.add(key)
            return
        try:
            recording, state = self._recorded(inputs, targets)
        except UnrecordableError as error:
            self._refuse(str(error))
            return
        self.records[key] = _Record(recording, self._is_exact)
        if self._state is None:
            self._state = state

    def _recorded(self, inputs: Any, targets: Any) -> tuple[Recording, PythonState]:
        """A record, of the metrics too if they can be recorded, and what it depends on besides tensors."""
        if self._metrics is not None and not self._metrics.are_late:
            state = PythonState(self._model, [*self._callables, *self._metrics.callables])
            try:
                return record(self._measuring, state, self._variables, inputs, targets), state
            except UnrecordableError as error:
                self._leave_metrics(str(error))
        state = PythonState(self._model, self._callables)
        return record(self._compute, state, self._variables, inputs, targets), state

    def _measuring(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Measured]:
        """The computation, and what the slice adds to the metrics."""
        loss, predictions = self._compute(inputs, targets)
        assert self._metrics is not None
        return loss, Measured(predictions, self._metrics.added(targets, predictions))

    def _measures(self, targets: Any, found: Measured) -> bool:
        """Whether metrics got what Keras adds for the same predictions."""
        return self._metrics is not None and self._metrics.would_add(targets, found, self._is_exact)

    @property
    def calls(self) -> torch.Tensor:
        """A row of two for each signature: its digest, and calls so far; or that nothing is recorded."""
        if self.refusal is not None:
            return torch.tensor([_REFUSED])
        rows = [[digest(key), self._calls_of(key)] for key in self._met]
        rows += [[key, calls] for key, calls in self._before.items()]
        return torch.tensor(sorted(rows), dtype=torch.int64).reshape(-1, 2)

    def _calls_of(self, key: Any) -> int:
        """How often a signature was met, as far as it matters for the next time."""
        known = self.records.get(key)
        return 1 if known is None else known.uses + _UNRECORDED

    def go_on_from(self, calls: torch.Tensor) -> None:
        """Records and replays from here on as another would that has come as far as its `calls` say."""
        rows = calls.tolist()
        self._met.clear()
        self.records.clear()
        self._before = {}
        self.refusal = None
        if _REFUSED in rows:
            self.refusal = "it was not recorded in the run that this one goes on from"
        else:
            self._before = dict(rows)

    def _catch_up(self, key: Any, inputs: Any, targets: Any) -> None:
        """Does at once what the run that this one goes on from did when it met a signature."""
        calls = self._before.pop(digest(key), 0)
        if not calls:
            return
        self._met.add(key)
        if calls < _UNRECORDED:
            return
        self._outcome(self._compute, inputs, targets)  # in their first calls, layers change
        self._meet(key, inputs, targets)
        known = self.records.get(key)
        if known is not None and calls > _UNRECORDED:
            known.uses = calls - _UNRECORDED
            known.pass_checks()
            self._check(known, inputs, targets, is_first=True)

    def _forget(self) -> None:
        """Lets everything be recorded again: somebody has changed the model."""
        self._renewals += 1
        if self._renewals > _RENEWALS:
            assert self._state is not None
            self._refuse(f"an attribute changes again and again: {self._state.change()}")
        self.records.clear()
        self._state = None

    def _check(self, known: _Record, inputs: Any, targets: Any, is_first: bool) -> None:
        """Compares a replay to the computation itself; all that they move is taken back."""
        expected = self._outcome(self._compute, inputs, targets)
        found = self._outcome(known.recording, inputs, targets)
        difference = self._difference(expected, found, (inputs, targets), exact=known.is_exact)
        if difference == METRICS_DIFFER:
            self._leave_metrics(_seen(difference, known))
            warnings.warn(self._told_unmeasured(), RuntimeWarning, stacklevel=2)
        elif difference is not None:
            self._refuse(_seen(difference, known))
        elif is_first:
            self._hasten(known, known.recording.rearranged, expected, (inputs, targets))
            if self._compiles:
                self._compile(known, expected, (inputs, targets))

    def _difference_on(self, recording: Recording, inputs: Any, targets: Any) -> str | None:
        """In what a record's outcome is not Keras' where no bit may differ."""
        expected = self._outcome(self._compute, inputs, targets)
        found = self._outcome(recording, inputs, targets)
        return expected.difference(found, exact=self._is_exact)

    def _hasten(
        self, known: _Record, faster: Recording | None, expected: Outcome, batch: tuple[Any, Any]
    ) -> str | None:
        """Takes faster operations for a record that has proved right; if they do not prove near, says how."""
        if faster is None:
            return None
        difference = self._difference(expected, self._outcome(faster, *batch), batch, exact=False)
        if difference is None:
            known.recording, known.is_exact = faster, False
        return difference

    def _difference(
        self, expected: Outcome, found: Outcome, batch: tuple[Any, Any], exact: bool
    ) -> str | None:
        """In what an outcome is not Keras'; how far rounding grows is looked at only where it matters."""
        difference = expected.difference(found, exact)
        if difference is None or exact:
            return difference
        inputs, targets = batch
        with weights_rounded(self._parameters):
            grown = self._outcome(self._compute, rounded(inputs), targets)
        return expected.difference(found, exact, grown)

    def _compile(self, known: _Record, expected: Outcome, batch: tuple[Any, Any]) -> None:
        """Takes a record's compiled form; says so where it cannot."""
        compiled = known.recording.compiled
        why = UNCOMPILED if compiled is None else self._hasten(known, compiled, expected, batch)
        if why is not None:
            warnings.warn(self._told_uncompiled(why), RuntimeWarning, stacklevel=2)

    def _outcome(self, compute: Compute, inputs: Any, targets: Any) -> Outcome:
        return Outcome.of(
            compute, (inputs, targets), self._parameters, self._others, self._measures
        )

    @property
    def _is_exact(self) -> bool:
        """Whether the same operations give the same bits each time: on GPUs some do not."""
        return all(parameter.device.type == "cpu" for parameter in self._parameters)

    def _refuse(self, why: str) -> None:
        """Computes without a record from now on, and says so."""
        self.refusal = why
        self.records.clear()
        warnings.warn(told(self._phase, why), RuntimeWarning, stacklevel=2)

    def _leave_metrics(self, why: str) -> None:
        """Lets Keras compute the metrics from now on; the rest is recorded anew."""
        self.unmeasured, self._metrics, self._state = why, None, None
        self.records.clear()

    def _told_unmeasured(self) -> str:
        return f"metrics of {self._phase} steps are not replayed, but computed by Keras: {self.unmeasured}"

    def _told_uncompiled(self, why: str) -> str:
        return f"{self._phase} steps are not compiled, but replayed as they are: {why}"

    def remark(self, inputs: Any, targets: Any) -> str | None:
        """Says why slices like these are not replayed or not compiled, having tried it; None if they are."""
        if self.refusal is not None:
            return told(self._phase, self.refusal)
        with torch.set_grad_enabled(self._phase == "training"):
            self._outcome(self._compute, inputs, targets)  # in their first calls, layers change
            try:
                recording, _ = self._recorded(inputs, targets)
            except UnrecordableError as error:
                return told(self._phase, str(error))
            difference = self._difference_on(recording, rolled(inputs), rolled(targets))
        if difference is not None:
            return told(self._phase, difference)
        if self._compiles and recording.draws:
            return self._told_uncompiled(UNCOMPILED)
        return None if self.unmeasured is None else self._told_unmeasured()


def told(phase: str, why: str) -> str:
    """What people read where a phase is computed by Keras."""
    return f"{phase} steps are not replayed from a record, but computed by Keras, which takes longer: {why}"


def _seen(difference: str, known: _Record) -> str:
    """A difference, and since when it may have been there."""
    if not known.agreed:
        return difference
    return f"{difference}, seen at use {known.uses} of the record; it agreed at use {known.agreed}"
