"""Cache of captured graphs of a Keras computation: when to capture, verify and replay."""

from __future__ import annotations

import warnings
from collections.abc import Sequence, Set
from typing import Any

import keras
import torch

from isotrain.adapters.keras.carried_state import distinct
from isotrain.adapters.torch.base.pytree import digest, rolled, signature
from isotrain.adapters.torch.graph.captured_graph import CapturedGraph
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
from isotrain.adapters.torch.graph.verify import METRICS_DIFFER, Outcome, Verifier
from isotrain.adapters.torch.metrics.base import MeasuredPredictions

_MAX_SIGNATURES = 16
"""Number of signatures that are captured; Keras computes inputs of further shapes."""
_EAGER_CALLS = 2
"""Calls of a signature before the first replay."""
_MAX_RECAPTURES = 8
"""Number of times that changed attributes lead to new captures; after that, nothing is captured any more."""
_REFUSED, _EXCLUDED, _RECAPTURED = -1, -2, -3
"""Markers in the second column of `call_counts`: nothing is captured; an excluded metric; re-captures."""
_NOT_CAPTURED_BEFORE = "it was not captured in the run that this one resumes"


class GraphCache:
    """A computation of a Keras model that is captured once per input signature and then replayed.

    Keras computes a signature (shapes and dtypes of a slice) the first time, it is captured the second time,
    and replayed from the third time on. The first replay is compared with Keras on data that it was not
    captured from, and later replays ever more seldom. After `capture_now` every call of a signature is a
    replay, so that results do not depend on earlier calls.

    Attributes:
        refusal: Reason that nothing is captured; None as long as something may be.
        graphs: Captured graphs by signature.
        is_paused: Whether Keras computes for now, and calls are not counted.
    """

    def __init__(
        self,
        compute: Compute,
        model: keras.Layer,
        phase: str,
        compiles: bool = False,
        callables: Sequence[Any] = (),
        carried: Sequence[Any] = (),
        optimizes: bool = True,
    ) -> None:
        """Captures nothing yet.

        Args:
            compute: Function from inputs and targets to the mean loss and the predictions.
            model: Keras model whose layers are called.
            phase: `training` or `evaluation`, for messages.
            compiles: Whether `torch.compile` compiles the captured graphs.
            callables: Losses or an objective that are called besides layers, and may have attributes.
            carried: Keras variables whose previous values gradients may need.
            optimizes: Whether to replay faster graphs that agree up to rounding, where a batch shows that, or
                only such with the same bits.
        """
        self.refusal: str | None = None
        self._compiles = compiles
        self._callables = callables
        self._compute = compute
        self._model = model
        self._phase = phase
        others = distinct([*model.non_trainable_variables, *carried])
        self._variables = [*model.trainable_variables, *others]
        self._carried = carried
        self._optimizes = optimizes
        self._verifier = Verifier(
            compute,
            [variable.value for variable in model.trainable_variables],
            [variable.value for variable in others],
            self._wrong_metrics,
        )
        self._seen: set[Any] = set()
        self.graphs: dict[Any, CapturedGraph] = {}
        self._state: PythonState | None = None
        self._recaptures = 0
        self._resumed_calls: dict[int, int] = {}
        self._metrics = CapturedMetrics()
        self._reported: set[str] = set()
        self._captures_at_once = False
        self.is_paused = False

    def measure(self, metrics: CapturedMetrics) -> None:
        """Adds metrics to the captured graphs, which then return `MeasuredPredictions`, not predictions."""
        self._metrics = metrics

    def forget(self) -> None:
        """Drops all graphs: each signature is computed by Keras, captured and replayed anew."""
        self._seen.clear()
        self.graphs.clear()
        self._resumed_calls.clear()

    def capture_now(self) -> None:
        """Captures a signature the first time it comes, and replays it from that call on."""
        self._captures_at_once = True

    def __call__(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
        """Computes the mean loss (scalar, or two rows: losses and denominators) and the predictions."""
        if self.refusal is not None or self.is_paused:
            return self._compute(inputs, targets)
        key = signature(inputs), signature(targets)
        if self._resumed_calls:
            self._resume_signature(key, inputs, targets)
        self._drop_stale_graphs()
        if self._captures_at_once and key not in self.graphs:
            self._capture_at_once(key, inputs, targets)
        captured = self.graphs.get(key)
        if captured is None:
            self._register(key, inputs, targets)
        elif self._is_valid(captured, inputs, targets):
            try:
                return captured.traced_graph(inputs, targets)
            except Exception as error:
                failure = error
            again = self._compute_with_metrics if self._metrics.captured else self._compute
            again(inputs, targets)  # its error names the layer, the loss or metric, and the value
            raise failure
        return self._compute(inputs, targets)

    def _register(self, key: Any, inputs: Any, targets: Any) -> None:
        """Notes a new signature; captures one that comes for the second time."""
        if self.refusal is not None:
            return
        if key not in self._seen:
            if self._has_room:
                self._seen.add(key)
            return
        self._ensure_built(inputs, targets)
        if not self.graphs:
            self._save_state()
        try:
            traced_graph = self._capture(inputs, targets)
        except UncapturableError as error:
            self._refuse(str(error))
            return
        self._warn_excluded()
        self.graphs[key] = CapturedGraph(traced_graph, self._verifier.is_exact)

    @property
    def _has_room(self) -> bool:
        """Whether one more signature may be captured, besides those of the resumed run."""
        return len(self._seen) + len(self._resumed_calls) < _MAX_SIGNATURES

    def _capture_at_once(self, key: Any, inputs: Any, targets: Any) -> None:
        """Captures a signature, again until no further metric has to be excluded."""
        if key not in self._seen and not self._has_room:
            return
        self._seen.add(key)
        self._verifier.expected(inputs, targets)  # in their first calls, layers change
        while self.refusal is None and key not in self.graphs:
            self._fast_forward(_EAGER_CALLS + 1, key, inputs, targets)

    def _ensure_built(self, inputs: Any, targets: Any) -> None:
        """Builds metrics that have no variables yet, as those of a run that was not stopped have them."""
        if self._metrics.are_unbuilt:
            self._metrics.ensure_built(targets, predicted(self._compute, inputs, targets))

    def _save_state(self) -> None:
        """Saves the Python state that captured graphs depend on besides tensors."""
        self._state = PythonState(self._model, self._callables)
        self._metrics.save_state()

    def _capture(self, inputs: Any, targets: Any) -> TracedGraph:
        """Captures the computation with all metrics that can be captured; excludes the others."""
        metrics = self._metrics
        if not metrics.captured:
            return self._traced(self._compute, self._callables, inputs, targets)
        try:
            callables = [*self._callables, *metrics.callables]
            return self._traced(self._compute_with_metrics, callables, inputs, targets)
        except UncapturableError as error:
            without = self._traced(self._compute, self._callables, inputs, targets)
            predictions = predicted(self._compute, inputs, targets)
            metrics.exclude_uncapturable(targets, predictions, str(error))
        return self._capture(inputs, targets) if metrics.captured else without

    def _traced(
        self, compute: Compute, callables: Sequence[Any], inputs: Any, targets: Any
    ) -> TracedGraph:
        state = PythonState(self._model, callables)
        return capture(compute, state, self._variables, inputs, targets, self._carried)

    def _compute_with_metrics(
        self, inputs: Any, targets: Any
    ) -> tuple[torch.Tensor, MeasuredPredictions]:
        """Computes the loss (shapes: see `LossModule`), and what the slice adds to the metrics."""
        loss, predictions = self._compute(inputs, targets)
        return loss, self._metrics.increments(targets, predictions)

    def _wrong_metrics(self, targets: Any, measured: MeasuredPredictions) -> list[str]:
        """Names of the metrics whose increments differ from Keras' for the same predictions."""
        return self._metrics.mismatched(targets, measured, self._verifier.is_exact)

    def call_counts(self) -> torch.Tensor:
        """Execution state for checkpoints, int64 `[rows, 2]`, sorted.

        A row is the digest of a signature and its number of calls; or, with a marker in the second column,
        the digest of an excluded metric's name, the number of re-captures, or the refusal. Changed attributes
        are noticed here too, so that a resumed run does the same as this one.
        """
        self._drop_stale_graphs()
        rows = [[digest(key), self._calls_of(key)] for key in self._seen]
        rows += [[key, calls] for key, calls in self._resumed_calls.items()]
        rows += [[digest(name), _EXCLUDED] for name in self._metrics.excluded]
        rows += [[self._recaptures, _RECAPTURED]] * (self._recaptures > 0)
        rows = rows if self.refusal is None else [[0, _REFUSED]]
        return torch.tensor(sorted(rows), dtype=torch.int64).reshape(-1, 2)

    def _calls_of(self, key: Any) -> int:
        """Number of calls of a signature, as far as the next call depends on it."""
        captured = self.graphs.get(key)
        return 1 if captured is None else captured.uses + _EAGER_CALLS

    def resume_from(self, calls: torch.Tensor) -> None:
        """Restores `call_counts` (int64 `[rows, 2]`): captures and replays as the saved run would have."""
        rows = calls.tolist()
        self._seen.clear()
        self.graphs.clear()
        kinds = [kind for _, kind in rows]
        self.refusal = _NOT_CAPTURED_BEFORE if _REFUSED in kinds else None
        self._resumed_calls = {number: calls for number, calls in rows if calls > 0}
        self._recaptures = sum(number for number, kind in rows if kind == _RECAPTURED)
        excluded = {number for number, kind in rows if kind == _EXCLUDED}
        names = [name for name in self._metrics.names if digest(name) in excluded]
        self._metrics.excluded = dict.fromkeys(names, _NOT_CAPTURED_BEFORE)
        self._reported = set(names)

    def _resume_signature(self, key: Any, inputs: Any, targets: Any) -> None:
        """Captures a signature at once if the resumed run had done so."""
        calls = self._resumed_calls.pop(digest(key), 0)
        if not calls:
            return
        self._seen.add(key)
        self._verifier.expected(inputs, targets)  # in their first calls, layers change
        if calls >= _EAGER_CALLS:
            self._fast_forward(calls, key, inputs, targets)

    def _fast_forward(self, calls: int, key: Any, inputs: Any, targets: Any) -> None:
        """Captures a signature as it is after so many calls, and verifies it as at its first replay."""
        self._register(key, inputs, targets)
        captured = self.graphs.get(key)
        if captured is not None and calls > _EAGER_CALLS:
            captured.uses = calls - _EAGER_CALLS
            captured.pass_checks()
            self._check(captured, rolled(inputs), targets, is_first=True)

    def _drop_stale_graphs(self) -> None:
        """Checks the guards: drops all graphs if the model has changed; excludes metrics that have."""
        if not self.graphs or self._state is None:
            return
        if not self._state.is_unchanged:
            self._recaptures += 1
            if self._recaptures > _MAX_RECAPTURES:
                self._refuse(
                    f"an attribute changed more than {_MAX_RECAPTURES} times:"
                    f" {self._state.describe_change()}"
                )
            self.graphs.clear()
        elif not self._metrics.are_unchanged:
            self._metrics.exclude_changed()
            self._warn_excluded()

    def _is_valid(self, captured: CapturedGraph, inputs: Any, targets: Any) -> bool:
        """Counts one use of a graph, verifies it when a check is due, and tells whether it may be used."""
        captured.uses += 1
        if captured.uses == captured.next_check:
            self._check(captured, inputs, targets, is_first=captured.uses == 1)
            captured.pass_checks()
        return bool(self.graphs)

    def _check(self, captured: CapturedGraph, inputs: Any, targets: Any, is_first: bool) -> None:
        """Compares a replay with Keras, without effects; at first, also tries faster graphs."""
        expected = self._verifier.expected(inputs, targets)
        replayed = self._verifier.outcome(captured.traced_graph, inputs, targets)
        difference = self._verifier.difference(
            expected, replayed, (inputs, targets), exact=captured.is_exact
        )
        if difference == METRICS_DIFFER:
            self._exclude_wrong_metrics(replayed, captured)
            self._warn_excluded()
        elif difference is not None:
            self._refuse(captured.with_uses(difference))
        elif is_first:
            faster = captured.traced_graph.optimized(exactly=not self._optimizes)
            self._try_faster(captured, faster, expected, (inputs, targets))
            if self._compiles and self._optimizes:
                self._compile(captured, expected, (inputs, targets))

    def _exclude_wrong_metrics(self, replayed: Outcome, captured: CapturedGraph) -> None:
        """Excludes the metrics whose captured increments differ from Keras'."""
        why = captured.with_uses("it differs from that of a step by Keras")
        self._metrics.excluded |= dict.fromkeys(replayed.wrong_metrics, why)

    def _try_faster(
        self,
        captured: CapturedGraph,
        faster: TracedGraph | None,
        expected: Outcome,
        batch: tuple[Any, Any],
    ) -> str | None:
        """Replaces a verified graph by a faster one that agrees as far as it must; if not, returns why."""
        if faster is None:
            return None
        is_exact = captured.is_exact and not self._optimizes
        difference = self._verifier.difference(
            expected, self._verifier.outcome(faster, *batch), batch, exact=is_exact
        )
        if difference is None:
            captured.traced_graph, captured.is_exact = faster, is_exact
        return difference

    def _compile(self, captured: CapturedGraph, expected: Outcome, batch: tuple[Any, Any]) -> None:
        """Replaces a graph by its compiled form; warns where that is not possible."""
        compiled = captured.traced_graph.compiled
        why = (
            UNCOMPILED_RANDOM
            if compiled is None
            else self._try_faster(captured, compiled, expected, batch)
        )
        if why is not None:
            warnings.warn(self._uncompiled_note(why), RuntimeWarning, stacklevel=2)

    def _refuse(self, why: str) -> None:
        """Leaves the phase to Keras from now on, with a warning."""
        self.refusal = why
        self.graphs.clear()
        warnings.warn(eager_note(self._phase, why), RuntimeWarning, stacklevel=2)

    def _warn_excluded(self) -> None:
        """Warns of metrics that were excluded since the last warning; the rest is captured anew."""
        names = self._metrics.excluded.keys() - self._reported
        if names:
            self.graphs.clear()
            self._reported |= names
            warnings.warn(self._excluded_note(names), RuntimeWarning, stacklevel=2)

    def _excluded_note(self, names: Set[str]) -> str:
        reasons = [
            f"{name}: {why}" for name, why in self._metrics.excluded.items() if name in names
        ]
        return (
            f"metrics of {self._phase} steps are not replayed, but computed by Keras: "
            + "; ".join(reasons)
        )

    def _uncompiled_note(self, why: str) -> str:
        return f"{self._phase} steps are not compiled, but replayed as they are: {why}"

    def notes(self, inputs: Any, targets: Any) -> list[str]:
        """Tries to capture a slice; returns notes on what is not replayed or not compiled, and why."""
        if self.refusal is not None:
            return [eager_note(self._phase, self.refusal)]
        with torch.set_grad_enabled(self._phase == "training"):
            self._verifier.expected(inputs, targets)  # in their first calls, layers change
            self._ensure_built(inputs, targets)
            try:
                captured = CapturedGraph(self._capture(inputs, targets), self._verifier.is_exact)
            except UncapturableError as error:
                return [eager_note(self._phase, str(error))]
            difference = self._trial_difference(captured, rolled(inputs), targets)
        if difference is not None:
            return [eager_note(self._phase, difference)]
        excluded = self._metrics.excluded.keys()
        is_uncompiled = self._compiles and captured.traced_graph.draws
        return [
            *([self._uncompiled_note(UNCOMPILED_RANDOM)] if is_uncompiled else []),
            *([self._excluded_note(excluded)] if excluded else []),
        ]

    def _trial_difference(self, captured: CapturedGraph, inputs: Any, targets: Any) -> str | None:
        """First difference from Keras on a batch, or None; excludes metrics that differ."""
        expected = self._verifier.expected(inputs, targets)
        replayed = self._verifier.outcome(captured.traced_graph, inputs, targets)
        difference = expected.difference(replayed, exact=captured.is_exact)
        if difference != METRICS_DIFFER:
            return difference
        self._exclude_wrong_metrics(replayed, captured)
        return None


def eager_note(phase: str, why: str) -> str:
    """Note that Keras computes a phase, and why."""
    return f"{phase} steps are not replayed, but computed by Keras, which takes longer: {why}"
