"""Base of the step contexts of all frameworks: refuses collectives that would give other results."""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isotrain.adapters.common.sample_draws import DrawKeys, PassDraws, active
from isotrain.plugin import SpecError, StepContext, draw_by, slice_bounds

if TYPE_CHECKING:
    from isotrain.plugin import TrainingSpec


def one_shape_expected(method: str) -> str:
    """Text of the error for a collective whose tensor has several shapes."""
    if method == "all_gather":
        return (
            "objective: step.all_gather: expected rows of one shape on all replicas, of which each may have"
            " another number. Pad them to one length."
        )
    return (
        f"objective: step.{method}: expected tensors of one shape on all replicas. Reduce the rows first, as"
        f" in step.{method}(ops.{method}(x, axis=0)); step.all_gather(x) takes uneven rows."
    )


def of_replicas(shapes: Sequence[str]) -> str:
    """Shapes, one for each replica, with the replicas: `[2, 6] of replicas 0 to 2, [1, 6] of replica 3`."""
    runs, first = [], 0
    for shape, group in itertools.groupby(shapes):
        last = first + len([*group]) - 1
        replicas = f"replica {first}" if last == first else f"replicas {first} to {last}"
        runs.append(f"{shape} of {replicas}")
        first = last + 1
    return ", ".join(runs)


class CommonStepContext(StepContext):
    """Step context of the replicas of one process.

    Attributes:
        communicates: Whether an objective has called a collective.
        is_alone: Whether this replica tries a pass that the others do not take part in.
        has_ghost_batches: Whether batch normalizations compute statistics of each ghost batch, several of
            which are in a pass.
        draw_keys: Keys of random numbers by sample; None where each replica draws its own.
    """

    def __init__(self, spec: TrainingSpec, frozen: Mapping[str, Callable[..., Any]]) -> None:
        """Starts without values.

        Args:
            spec: Training spec.
            frozen: Frozen models by name.
        """
        self.is_training = False
        self.values = {}
        self.frozen = frozen
        self.communicates = False
        self.is_alone = False
        draw_by(spec.random_layers)
        self.draw_keys = DrawKeys(spec.seed) if spec.random_layers == "per-sample" else None
        self._is_reproducible = spec.reproducible is not None
        self.has_ghost_batches = spec.batch_norm == "ghost" and not self._is_reproducible
        self._ghost_batches = spec.dealt_parts or 0
        self._pass = threading.local()  # TensorFlow traces each replica in a thread
        self._refusal = (
            "with gradient_accumulation_steps it would see the micro-batch alone. Leave that out"
            if spec.gradient_accumulation_steps > 1
            else None
        )

    def draw_for(self, update: str) -> None:
        """Lets passes of a named update draw other numbers by sample than those of other updates."""
        if self.draw_keys is not None:
            self.draw_keys.update = update

    @abstractmethod
    def rows_of(self, inputs: Any) -> int:
        """Number of samples of a pass over inputs, a tree of tensors `[batch, ...]`."""

    @abstractmethod
    def pass_draws(self, keys: DrawKeys, inputs: Any) -> PassDraws:
        """Random numbers by sample for a pass over inputs, a tree of tensors `[batch, ...]`."""

    @abstractmethod
    def refusing_other_draws(self, inputs: Any) -> contextlib.AbstractContextManager[None]:
        """Context of a pass that refuses random numbers that the framework draws in its own way.

        Args:
            inputs: Pytree of tensors, shapes `[batch, ...]`. A backend may check passes 1, 2, 4, 8, ... alone
                of each phase over inputs of these shapes.
        """

    def drawing(self, compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Makes a function of inputs and targets draw by sample, or refuse to draw, if the spec says so."""
        keys = self.draw_keys
        if keys is None and not self._is_reproducible and not self.has_ghost_batches:
            return compute

        def compute_pass(inputs: Any, targets: Any) -> Any:
            draws = (
                contextlib.nullcontext() if keys is None else active(self.pass_draws(keys, inputs))
            )
            refusal = (
                contextlib.nullcontext()
                if keys is None and not self._is_reproducible
                else self.refusing_other_draws(inputs)
            )
            self._pass.rows = self.rows_of(inputs)
            with draws, refusal:
                return compute(inputs, targets)

        return compute_pass

    def ghost_batches(self, rows: int) -> list[slice]:
        """The rows of each ghost batch of this replica that has samples.

        Args:
            rows: Rows of a tensor of the model, one for each sample in the samples' order.

        Raises:
            SpecError: There are more or fewer, whose samples are not known.
        """
        if rows != self._pass.rows:
            raise SpecError(
                f"batch_norm: ghost: a batch normalization has {rows} rows of {self._pass.rows} samples, so"
                " that it is not known which are of a ghost batch. Use batch_norm: global."
            )
        first, end = slice_bounds(self._ghost_batches, self.replicas, self.index)
        bounds = [slice_bounds(rows, end - first, i) for i in range(end - first)]
        return [slice(start, stop) for start, stop in bounds if start < stop]

    def require_collective(self, method: str) -> None:
        """Refuses a collective whose result would not be that of the global batch.

        Args:
            method: Name of the collective.

        Raises:
            SpecError: The batch is split in time, or replicas train weights of their own.
        """
        self.communicates = True
        if self._refusal is not None:
            raise SpecError(f"objective: step.{method}: {self._refusal}.")

    @staticmethod
    def require_one_shape(method: str, shapes: Sequence[Sequence[int]]) -> None:
        """Refuses tensors of several shapes.

        Args:
            method: Name of the collective.
            shapes: Shapes of the tensors of all replicas.

        Raises:
            SpecError: They differ.
        """
        if any(each != shapes[0] for each in shapes):
            received = of_replicas([*map(str, shapes)])
            raise SpecError(f"{one_shape_expected(method)} Received {received}.")

    def refuse_workers(self) -> None:
        """Refuses collectives from now on: a worker of a parameter-server run computes alone."""
        self._refusal = (
            "a worker of a parameter-server run computes alone. Use strategy data-parallel"
        )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context of passes of this replica alone: batch normalizations use its samples."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Context of a step of this replica alone: collectives are refused in it."""
        refusal, self._refusal = (
            self._refusal,
            (
                "under this strategy each replica updates weights of its own in this step, so that a loss"
                " over all replicas has no gradient. Use strategy data-parallel"
            ),
        )
        try:
            yield
        finally:
            self._refusal = refusal
