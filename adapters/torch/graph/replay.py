"""Keras computations that are recorded when they come again, and replayed from then on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import keras
import torch

from isotrain.adapters.torch.base.pytree import digest, rolled, signature
from isotrain.adapters.torch.graph.guards.python_state import PythonState
from isotrain.adapters.torch.graph.metrics.phase_metrics import CapturedMetrics
from isotrain.adapters.torch.graph.trace import (
    UNCOMPILED_RANDOM,
    Compute,
    TracedGraph,
    capture,
    predicted,
)
from isotrain.adapters.torch.graph.traceability import UncapturableError
from isotrain.adapters.torch.graph.verify import (
    METRICS_DIFFER,
    Outcome,
    perturbed,
    perturbed_weights,
)
from isotrain.adapters.torch.metrics.base import MeasuredPredictions

_AGAIN = 16
"""It is checked again after this many times as many uses."""
_AFTER = 4096
"""Uses after which it is checked again in any case."""


@dataclass
class PeriodicallyChecked:
    """What is used again and again, and checked now and then.

    Attributes:
        uses: How often it was used.
        next_check: The use at which it is checked next.
        agreed: The use at which it was checked last; 0 before the first.
    """

    uses: int = 0
    next_check: int = 1
    agreed: int = 0

    def pass_checks(self) -> None:
        """Lets those lie behind it that belong to its uses so far."""
        while self.next_check <= self.uses:
            self.agreed = self.next_check
            self.next_check += min((_AGAIN - 1) * self.next_check, _AFTER)


_SIGNATURES = 16
"""Records that are kept; inputs of further shapes are computed without."""
_UNRECORDED = 2
"""Calls of a signature before the first replay."""
_RENEWALS = 8
"""How often a model's own attributes may change before nothing is recorded any more."""
_REFUSED, _LEFT, _RENEWED = -1, -2, -3
"""Beside a number in `calls`: nothing is recorded; a metric is left to Keras; so many renewals."""
_IN_THE_RUN_BEFORE = "it was not recorded in the run that this one goes on from"


class _CapturedGraph(PeriodicallyChecked):
    """The recording for one signature, and whether its bits are Keras' own."""

    def __init__(self, traced_graph: TracedGraph, is_exact: bool) -> None:
        super().__init__()
        self.traced_graph = traced_graph
        self.is_exact = is_exact


class GraphCache:
    """A computation of a Keras model, without Keras' Python in most of its calls.

    A signature (the shapes and types of a slice) is computed by Keras when it is met first, recorded when
    it is met again, and replayed from the third time on. The first replay is compared to the computation
    itself on data that the recording has not seen, and so are later ones, ever more seldom. After
    `capture_now` all of a signature is replayed, so that nothing hangs on what came before.

    Attributes:
        refusal: Why nothing is recorded; None as long as something may be.
        graphs: By signature.
        is_paused: Whether it computes without a record for now, and counts nothing.
    """

    def __init__(
        self,
        compute: Compute,
        model: keras.Layer,
        phase: str,
        compiles: bool = False,
        callables: Sequence[Any] = (),
        carried: Sequence[Any] = (),
    ) -> None:
        """Records nothing yet.

        Args:
            compute: From inputs and targets to the mean loss and the predictions.
            model: Whose layers it calls.
            phase: `training` or `evaluation`, for messages.
            compiles: Whether records are to be compiled.
            callables: What it calls besides layers that has attributes: losses, an objective.
            carried: Variables of layers that are no weights.
        """
        self.refusal: str | None = None
        self._compiles = compiles
        self._callables = callables
        self._compute = compute
        self._model = model
        self._phase = phase
        self._variables = [
            *model.trainable_variables,
            *model.non_trainable_variables,
            *carried,
        ]
        self._carried = carried
        self._parameters = [variable.value for variable in model.trainable_variables]
        self._others = [v.value for v in (*model.non_trainable_variables, *carried)]
        self._met: set[Any] = set()
        self.graphs: dict[Any, _CapturedGraph] = {}
        self._state: PythonState | None = None
        self._renewals = 0
        self._before: dict[int, int] = {}
        self._metrics = CapturedMetrics()
        self._told: set[str] = set()
        self._is_at_once = False
        self.is_paused = False

    def measure(self, metrics: CapturedMetrics) -> None:
        """Adds metrics to the captured graphs, which then return `MeasuredPredictions`, not predictions."""
        self._metrics = metrics

    def capture_now(self) -> None:
        """Records a signature where it is met first, and computes that by the record, as all after it."""
        self._is_at_once = True

    def __call__(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Gives the mean loss and the predictions."""
        if self.refusal is not None or self.is_paused:
            return self._compute(inputs, targets)
        key = signature(inputs), signature(targets)
        if self._before:
            self._catch_up(key, inputs, targets)
        self._forget_changed()
        if self._is_at_once and key not in self.graphs:
            self._meet_at_once(key, inputs, targets)
        known = self.graphs.get(key)
        if known is None:
            self._meet(key, inputs, targets)
        elif self._is_right(known, inputs, targets):
            return known.traced_graph(inputs, targets)
        return self._compute(inputs, targets)

    def _meet(self, key: Any, inputs: Any, targets: Any) -> None:
        """Records a signature when it is met for the second time."""
        if self.refusal is not None:
            return
        if key not in self._met:
            if self._has_room:
                self._met.add(key)
            return
        self._ensure_built(inputs, targets)
        if not self.graphs:
            self._look()
        try:
            traced_graph = self._recorded(inputs, targets)
        except UncapturableError as error:
            self._refuse(str(error))
            return
        self._tell_left()
        self.graphs[key] = _CapturedGraph(traced_graph, self._is_exact)

    @property
    def _has_room(self) -> bool:
        """Whether one more signature may be recorded, besides those of the run before."""
        return len(self._met) + len(self._before) < _SIGNATURES

    def _meet_at_once(self, key: Any, inputs: Any, targets: Any) -> None:
        """Records a signature, until no metric must be left out of that any more."""
        if key not in self._met and not self._has_room:
            return
        self._met.add(key)
        self._outcome(self._compute, inputs, targets)  # in their first calls, layers change
        while self.refusal is None and key not in self.graphs:
            self._come_to(_UNRECORDED + 1, key, inputs, targets)

    def _ensure_built(self, inputs: Any, targets: Any) -> None:
        """Has metrics make sums that they lack, as another run's have that this one goes on from."""
        if self._metrics.are_unbuilt:
            self._metrics.ensure_built(targets, predicted(self._compute, inputs, targets))

    def _look(self) -> None:
        """Remembers what records depend on besides tensors."""
        self._state = PythonState(self._model, self._callables)
        self._metrics.remember()

    def _recorded(self, inputs: Any, targets: Any) -> TracedGraph:
        """A record, of those metrics too that can be recorded; others are left out from now on."""
        metrics = self._metrics
        if not metrics.captured:
            return self._written(self._compute, self._callables, inputs, targets)
        try:
            callables = [*self._callables, *metrics.callables]
            return self._written(self._measuring, callables, inputs, targets)
        except UncapturableError as error:
            without = self._written(self._compute, self._callables, inputs, targets)
            predictions = predicted(self._compute, inputs, targets)
            metrics.exclude_uncapturable(targets, predictions, str(error))
        return self._recorded(inputs, targets) if metrics.captured else without

    def _written(
        self, compute: Compute, callables: Sequence[Any], inputs: Any, targets: Any
    ) -> TracedGraph:
        state = PythonState(self._model, callables)
        return capture(compute, state, self._variables, inputs, targets, self._carried)

    def _measuring(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, MeasuredPredictions]:
        """The computation, and what the slice adds to the metrics."""
        loss, predictions = self._compute(inputs, targets)
        return loss, self._metrics.added(targets, predictions)

    def _wrong_metrics(self, targets: Any, found: MeasuredPredictions) -> list[str]:
        """The metrics that got something else than Keras adds for the same predictions."""
        return self._metrics.differing(targets, found, self._is_exact)

    def call_counts(self) -> torch.Tensor:
        """A row of two for each signature: its digest, and calls so far; and for what is not recorded.

        What has changed since the last call is noticed here too: one that goes on from them does as this one.
        """
        self._forget_changed()
        rows = [[digest(key), self._calls_of(key)] for key in self._met]
        rows += [[key, calls] for key, calls in self._before.items()]
        rows += [[digest(name), _LEFT] for name in self._metrics.excluded]
        rows += [[self._renewals, _RENEWED]] * (self._renewals > 0)
        rows = rows if self.refusal is None else [[0, _REFUSED]]
        return torch.tensor(sorted(rows), dtype=torch.int64).reshape(-1, 2)

    def _calls_of(self, key: Any) -> int:
        """How often a signature was met, as far as it matters for the next time."""
        known = self.graphs.get(key)
        return 1 if known is None else known.uses + _UNRECORDED

    def resume_from(self, calls: torch.Tensor) -> None:
        """Records and replays from here on as another would that has come as far as its `call_counts` say."""
        rows = calls.tolist()
        self._met.clear()
        self.graphs.clear()
        kinds = [kind for _, kind in rows]
        self.refusal = _IN_THE_RUN_BEFORE if _REFUSED in kinds else None
        self._before = {number: calls for number, calls in rows if calls > 0}
        self._renewals = sum(number for number, kind in rows if kind == _RENEWED)
        left = {number for number, kind in rows if kind == _LEFT}
        names = [name for name in self._metrics.names if digest(name) in left]
        self._metrics.excluded = dict.fromkeys(names, _IN_THE_RUN_BEFORE)
        self._told = set(names)

    def _catch_up(self, key: Any, inputs: Any, targets: Any) -> None:
        """Does at once what the run that this one goes on from did when it met a signature."""
        calls = self._before.pop(digest(key), 0)
        if not calls:
            return
        self._met.add(key)
        self._outcome(self._compute, inputs, targets)  # in their first calls, layers change
        if calls >= _UNRECORDED:
            self._come_to(calls, key, inputs, targets)

    def _come_to(self, calls: int, key: Any, inputs: Any, targets: Any) -> None:
        """Records a signature as that would be after so many calls, and compares it as its first replay."""
        self._meet(key, inputs, targets)
        known = self.graphs.get(key)
        if known is not None and calls > _UNRECORDED:
            known.uses = calls - _UNRECORDED
            known.pass_checks()
            self._check(known, rolled(inputs), targets, is_first=True)

    def _forget_changed(self) -> None:
        """Lets everything be recorded again if somebody has changed the model; or a metric, without it."""
        if not self.graphs or self._state is None:
            return
        if not self._state.is_unchanged:
            self._renewals += 1
            if self._renewals > _RENEWALS:
                self._refuse(f"an attribute changes again and again: {self._state.change()}")
            self.graphs.clear()
        elif not self._metrics.are_unchanged:
            self._metrics.exclude_changed()
            self._tell_left()

    def _is_right(self, known: _CapturedGraph, inputs: Any, targets: Any) -> bool:
        """Whether a record may be used once more; where it is due, it is compared."""
        known.uses += 1
        if known.uses == known.next_check:
            self._check(known, inputs, targets, is_first=known.uses == 1)
            known.pass_checks()
        return bool(self.graphs)

    def _check(self, known: _CapturedGraph, inputs: Any, targets: Any, is_first: bool) -> None:
        """Compares a replay to the computation itself; all that they move is taken back."""
        expected = self._outcome(self._compute, inputs, targets)
        found = self._outcome(known.traced_graph, inputs, targets)
        difference = self._difference(expected, found, (inputs, targets), exact=known.is_exact)
        if difference == METRICS_DIFFER:
            self._leave_wrong(found, known)
            self._tell_left()
        elif difference is not None:
            self._refuse(_seen(difference, known))
        elif is_first:
            self._hasten(known, known.traced_graph.optimized, expected, (inputs, targets))
            if self._compiles:
                self._compile(known, expected, (inputs, targets))

    def _leave_wrong(self, found: Outcome, known: _CapturedGraph) -> None:
        """Leaves metrics out of the records to which one has added what Keras does not."""
        why = _seen("it differs from that of a step without the record", known)
        self._metrics.excluded |= dict.fromkeys(found.wrong_metrics, why)

    def _hasten(
        self,
        known: _CapturedGraph,
        faster: TracedGraph | None,
        expected: Outcome,
        batch: tuple[Any, Any],
    ) -> str | None:
        """Takes faster operations for a record that has proved right; if they do not prove near, says how."""
        if faster is None:
            return None
        difference = self._difference(expected, self._outcome(faster, *batch), batch, exact=False)
        if difference is None:
            known.traced_graph, known.is_exact = faster, False
        return difference

    def _difference(
        self, expected: Outcome, found: Outcome, batch: tuple[Any, Any], exact: bool
    ) -> str | None:
        """In what an outcome is not Keras'; how far rounding grows is looked at only where it matters."""
        difference = expected.difference(found, exact)
        if difference is None or exact:
            return difference
        inputs, targets = batch
        with perturbed_weights(self._parameters):
            grown = self._outcome(self._compute, perturbed(inputs), targets)
        return expected.difference(found, exact, grown)

    def _compile(self, known: _CapturedGraph, expected: Outcome, batch: tuple[Any, Any]) -> None:
        """Takes a record's compiled form; says so where it cannot."""
        compiled = known.traced_graph.compiled
        why = (
            UNCOMPILED_RANDOM
            if compiled is None
            else self._hasten(known, compiled, expected, batch)
        )
        if why is not None:
            warnings.warn(self._told_uncompiled(why), RuntimeWarning, stacklevel=2)

    def _outcome(self, compute: Compute, inputs: Any, targets: Any) -> Outcome:
        return Outcome.of(
            compute, (inputs, targets), self._parameters, self._others, self._wrong_metrics
        )

    @property
    def _is_exact(self) -> bool:
        """Whether the same operations give the same bits each time: on GPUs some do not."""
        return all(parameter.device.type == "cpu" for parameter in self._parameters)

    def _refuse(self, why: str) -> None:
        """Computes without a record from now on, and says so."""
        self.refusal = why
        self.graphs.clear()
        warnings.warn(eager_note(self._phase, why), RuntimeWarning, stacklevel=2)

    def _tell_left(self) -> None:
        """Says which metrics have been left out since it was said last; the rest is recorded anew."""
        names = self._metrics.excluded.keys() - self._told
        if names:
            self.graphs.clear()
            self._told |= names
            warnings.warn(self._told_left(names), RuntimeWarning, stacklevel=2)

    def _told_left(self, names: Set[str]) -> str:
        reasons = [
            f"{name}: {why}" for name, why in self._metrics.excluded.items() if name in names
        ]
        return (
            f"metrics of {self._phase} steps are not replayed, but computed by Keras: "
            + "; ".join(reasons)
        )

    def _told_uncompiled(self, why: str) -> str:
        return f"{self._phase} steps are not compiled, but replayed as they are: {why}"

    def notes(self, inputs: Any, targets: Any) -> list[str]:
        """Says what of slices like these is not replayed or not compiled, and why, having tried it."""
        if self.refusal is not None:
            return [eager_note(self._phase, self.refusal)]
        with torch.set_grad_enabled(self._phase == "training"):
            self._outcome(self._compute, inputs, targets)  # in their first calls, layers change
            self._ensure_built(inputs, targets)
            try:
                known = _CapturedGraph(self._recorded(inputs, targets), self._is_exact)
            except UncapturableError as error:
                return [eager_note(self._phase, str(error))]
            difference = self._found_on(known, rolled(inputs), targets)
        if difference is not None:
            return [eager_note(self._phase, difference)]
        left = self._metrics.excluded.keys()
        uncompiled = self._compiles and known.traced_graph.draws
        return [
            *([self._told_uncompiled(UNCOMPILED_RANDOM)] if uncompiled else []),
            *([self._told_left(left)] if left else []),
        ]

    def _found_on(self, known: _CapturedGraph, inputs: Any, targets: Any) -> str | None:
        """In what a record that is not used yet is not Keras' on a batch; metrics are left out by it."""
        expected = self._outcome(self._compute, inputs, targets)
        found = self._outcome(known.traced_graph, inputs, targets)
        difference = expected.difference(found, exact=known.is_exact)
        if difference != METRICS_DIFFER:
            return difference
        self._leave_wrong(found, known)
        return None


def eager_note(phase: str, why: str) -> str:
    """What people read where a phase is computed by Keras."""
    return f"{phase} steps are not replayed from a record, but computed by Keras, which takes longer: {why}"


def _seen(difference: str, known: _CapturedGraph) -> str:
    """A difference, and since when it may have been there."""
    if not known.agreed:
        return difference
    return (
        f"{difference}, seen at use {known.uses} of the record; it agreed at use {known.agreed}, and what was"
        " computed by it since then may not be what Keras gives. What the model reads is no attribute of a"
        " layer, or changes where nobody can see it; `capture: false` in the spec does without records"
    )
