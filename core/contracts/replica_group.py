"""The neutral handle on the replicas that live in one process."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isotrain.core.contracts.replica import Computation, ReduceOp, Replica, Tensor
from isotrain.core.contracts.state import MODEL_STATE, ExportForm, StateInfo, StateKind
from isotrain.core.data.batch import Batch
from isotrain.core.errors import IsotrainError, UnsupportedError
from isotrain.core.pipeline.actions import Action
from isotrain.core.pipeline.executor import ExecutedAction
from isotrain.core.pipeline.profile import ModelProfile

if TYPE_CHECKING:
    import numpy as np  # imported below where it is needed: plans, which start sooner without it, need none


class Trait(StrEnum):
    """One thing that a layer does in training."""

    LOCAL_STATISTICS = "local-statistics"
    """Normalises with the mean and variance of the samples it is called with."""
    GLOBAL_STATISTICS = "global-statistics"
    """Asks to normalise with those of the global batch."""
    RANDOM = "random"
    """Draws random numbers from the framework's generator."""
    LOWER_PRECISION = "lower-precision"
    """Computes in fewer bits than the spec's precision."""
    CUSTOM_TRAINING = "custom-training"
    """Brings a step, loss or optimizer of its own for training, which is not called."""
    WITHOUT_GRADIENT = "without-gradient"
    """Is a trainable weight that the last step gave no gradient."""
    HIDDEN = "hidden"
    """May do any of these: nobody can look inside."""


@dataclass(frozen=True)
class LayerTrait:
    """A trait of one layer.

    Attributes:
        trait: What it does.
        layer: Its name in the model; of `CUSTOM_TRAINING` what is not called, of `WITHOUT_GRADIENT` the
            weight.
        kind: Its class.
    """

    trait: Trait
    layer: str
    kind: str


class LayoutSteps:
    """Steps of staged, served and sharded runs; a group that has none of them says so.

    Every method is called by every process at the same point unless its docstring says *local*, or who
    calls it.
    """

    def pipeline_step(
        self, batch: Batch, learning_rate: float, actions: Sequence[Sequence[Action]]
    ) -> Tensor:
        """Takes the micro-batches of a global batch through the stages of a pipeline run, and updates each.

        Args:
            batch: The slices of this process's replica, which all of its stages have.
            learning_rate: The rate of this step.
            actions: Of each stage.

        Returns:
            The loss of the global batch, equal on every process.
        """
        raise UnsupportedError(f"{type(self).__name__} is no group of a pipeline run.")

    def gather_stages(self) -> None:
        """Gives every process of a pipeline run the weights of all stages, as they are."""
        raise UnsupportedError(f"{type(self).__name__} is no group of a pipeline run.")

    def reshard_weights(self) -> None:
        """Leaves each process of a staged or fully sharded run the weights that it keeps up to date. Local.

        It does nothing in other runs. Called on every process before a checkpoint is read whose state is the
        same on all replicas; `gather_stages` and `unshard_weights` get the others again. Means of replicas
        and translated state are written whole.
        """

    def enable_action_timing(self) -> None:
        """Has `last_actions` tell of the staged steps from here on, also where to know it costs something."""

    def last_actions(self) -> Sequence[ExecutedAction]:
        """What this process did in the last staged step, where that was noted. Local."""
        return ()

    def profile_layers(self, batch: Batch) -> ModelProfile:
        """Times the layers of all stages of a pipeline run on a micro-batch, before the first step. Local."""
        raise UnsupportedError(f"{type(self).__name__} is no group of a pipeline run.")

    def unshard_weights(self) -> None:
        """Gives every process of a fully sharded run all weights, as they are, until the next step."""
        raise UnsupportedError(f"{type(self).__name__} is no group of a fully sharded run.")

    def parameter_server_step(
        self, batch: Batch, learning_rate: float, staleness: int | None
    ) -> Tensor:
        """Hands a global batch out to the workers of a parameter-server run. Called by the coordinator.

        Args:
            batch: All slices of it.
            learning_rate: The rate of this step.
            staleness: 0: returns after one update with the mean gradient, as a synchronised step does.
                Else each slice is an update of its own with its part of the rate, when it comes in;
                and slices are computed with weights in which all global batches are but the last
                `staleness`, or (None) any number.

        Returns:
            The loss of the global batch; with staleness an object that is ready later: `float` waits.
        """
        raise UnsupportedError(f"{type(self).__name__} is no group of a parameter-server run.")

    def parameter_server_stats(self) -> Mapping[str, Any]:
        """Statistics of a parameter-server run as JSON values: staleness, slices, lost workers. Local."""
        raise UnsupportedError(f"{type(self).__name__} is no group of a parameter-server run.")

    def shard_optimizer(self, weights: Sequence[Sequence[int]]) -> None:
        """Lets each replica here update some of the weights only, and keep slots for them alone. Local.

        Called before the first step, at most once.

        Args:
            weights: Of each local replica, the places of its weights among the trainable ones; some.
        """
        raise UnsupportedError(f"{type(self).__name__} updates all weights on each replica.")

    def update_shard(
        self,
        gradients: Sequence[Sequence[Tensor]],
        learning_rate: float,
        norms: Sequence[Tensor] | None,
    ) -> None:
        """Clips and applies, on each replica, reduced gradients of the weights that it keeps slots of. Local.

        Args:
            gradients: Of these weights, in the order in which `shard_optimizer` was told them.
            learning_rate: The rate of this step.
            norms: The norm of the gradients of all weights, where the spec clips by it: a scalar for each
                local replica, equal on all.
        """
        raise UnsupportedError(f"{type(self).__name__} updates all weights on each replica.")

    def reduce_scatter_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[Tensor]], Tensor]:
        """Computes gradients, and keeps of each bucket what a reduction makes of it; the rest is let go.

        Returns:
            Per local replica what was kept of all buckets, in their order; and the loss of the global batch.
        """
        raise UnsupportedError(f"{type(self).__name__} gives its gradients all at once.")


@dataclass(frozen=True)
class Reduction:
    """What a strategy makes of the gradients of a step, in parts; the same on every process.

    Attributes:
        buckets: Of each, the places of its weights among the trainable ones: each weight is in one of them.
        statics: Of each bucket, what `reduce` is given besides.
        reduce: `reduce(replica, gradients, static=...)` gives a list of tensors, which are kept.
        each_slice: Whether it is called for the gradients of each slice, and what it gives is added up over
            the slices of a step; or once, for the sums of the gradients.
    """

    buckets: tuple[tuple[int, ...], ...]
    statics: tuple[Hashable, ...]
    reduce: Computation
    each_slice: bool = False


CompressionMethod = Literal["fp16", "bf16", "powersgd", "topk"]
Phase = Literal["train", "evaluation"]


class ReplicaGroup(LayoutSteps, ABC):
    """The replicas of one process, and their ties to all others.

    Every method is called by every process at the same point unless its docstring says *local*.
    Where a method takes or gives a sequence of tensors, there is one per replica of this process, in
    the order of `local_replicas`. `LayoutSteps` has what only runs of other placements ask for.

    Attributes:
        replicas: Replicas in the whole run.
        local_replicas: The indices of the replicas that live in this process, ascending.
    """

    replicas: int
    local_replicas: tuple[int, ...]

    @abstractmethod
    def to_device(self, arrays: Any) -> Any:
        """Moves NumPy arrays of a slice, one or a tree of them, to the framework. Local; any thread."""

    def is_on_device(self, value: Any) -> bool:
        """Whether something is as `to_device` would make it: streams that give such are not copied. Local."""
        return False

    def optimizer_lr_schedule(self) -> Callable[[int], float] | None:
        """The schedule that the spec's own optimizer came with; None where it has none. Local.

        Returns:
            A function from the number of steps done to the rate of the next one, equal on every process.
        """
        return None

    def optimizer_rates(self) -> tuple[float, float] | None:
        """The rates of an optimizer that sets them itself, past those it is given. Local.

        Returns:
            Those of the last update and of the next; None of an optimizer that uses the rate of the step.
        """
        return None

    def weight_finalizer(self) -> Callable[[], None] | None:
        """What the spec's own optimizer does with the weights when training ends. Local.

        Returns:
            Such as replaces them by the averages that it keeps of them, on each replica; None where it does
            nothing.
        """
        return None

    @abstractmethod
    def synchronous_step(self, batch: Batch, learning_rate: float) -> Tensor:
        """Runs the backend's native synchronised data-parallel step.

        Args:
            batch: The global batch's slices of this process, already placed. A replica's loss is the
                sum over its micro-batches of `weight * mean`; the mean of that over all replicas is
                the mean over the global batch.
            learning_rate: The rate of this step.

        Returns:
            The loss of the global batch, a scalar tensor, equal on every replica.
        """

    @abstractmethod
    def local_step(self, batch: Batch, learning_rate: float) -> Tensor:
        """Updates each replica from its own slice alone; returns the loss of the global batch."""

    @abstractmethod
    def gradients(self, batch: Batch) -> tuple[list[list[Tensor]], Tensor]:
        """Computes each replica's gradients without exchanging them.

        Returns:
            Per local replica the gradients of the trainable weights, in the order of their names;
            and the loss of the global batch. The mean over all replicas of the gradients is the
            gradient of the global batch's mean loss.
        """

    @abstractmethod
    def apply_gradients(self, gradients: Sequence[Sequence[Tensor]], learning_rate: float) -> None:
        """Clips and applies gradients that are already reduced, on each replica. Local."""

    @contextlib.contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        """Puts back at its end what computing gradients moves, on each replica here. Local.

        That is the non-trainable state; and, where a group has them besides, training metrics and
        random streams, for which it overrides this.
        """
        before = self.read_state(("non-trainable",))
        try:
            yield
        finally:
            self.write_state(before)

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Puts back at its end what evaluations and predictions move, on each replica here. Local.

        Training goes on as if they had not been: with the states that layers carry, the random streams and
        the statistics that it had. Weights, which they leave alone, need not be copied for it.
        """
        kinds: tuple[StateKind, ...] = ("non-trainable", "random", "carry")
        before = {each: self.read_state(kinds, replica=each) for each in self.local_replicas}
        try:
            yield
        finally:
            for replica, state in before.items():
                self.write_state(state, replica=replica)

    def keep_gradients(self) -> bool:
        """Makes every later step keep the gradients that it updates the weights with. Local.

        Called before the first step, for diagnosis: it costs a copy of the gradients in each step.

        Returns:
            Whether the group can; unless it says otherwise, it cannot. None can where each replica
            updates weights of its own: it does not have the gradients of all.
        """
        return False

    def kept_gradients(self) -> list[list[Tensor]]:
        """The gradients of the last step as its update was given them. Local.

        Returns:
            Per local replica those of the trainable weights, in the order of their names: after the
            exchange, before clipping, and without any loss scale.

        Raises:
            UnsupportedError: `keep_gradients` was not called, or gave False.
        """
        raise UnsupportedError(f"{type(self).__name__} keeps no gradients.")

    @abstractmethod
    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        """Runs `computation(replica, *own)` for each replica of this process, natively.

        The framework compiles it where it compiles steps: it is then traced once for each pair of
        computation and `static`, so whatever else it depends on must be in `values`. Nothing in it is
        differentiated.

        Args:
            computation: Gets a `Replica`, and its own entry of each of `values`.
            values: Each has one entry per local replica: a tensor, or a list or tuple of tensors.
            static: What the computation depends on besides: hashable, the same on every process, and
                given to it as the keyword argument `static` unless it is None.

        Returns:
            Per local replica what the computation gave.
        """

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        """Asks that synchronised steps send their gradients compressed, natively. Local.

        Called before the first step, at most once.

        Args:
            method: How.
            rank: Of the approximation that `powersgd` sends.
            start: Steps before `powersgd` begins.

        Returns:
            True if they will; False, and nothing is changed, if the backend has no such method.
        """
        return False

    @abstractmethod
    def evaluation_step(self, batch: Batch) -> None:
        """Adds a batch's loss and metrics to the evaluation accumulators. Local."""

    @abstractmethod
    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        """Calls the model on samples in evaluation mode, in the precision of the run. Local.

        Args:
            inputs: Of each local replica, already placed: shape `[samples, ...]`, or a tree of such.

        Returns:
            Of each local replica what its model gave: a tensor, or tensors in dicts, lists and tuples.
        """

    @abstractmethod
    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        """Gives the exact means over all samples of all replicas since the last call, and resets.

        `evaluation` has `loss` besides the spec's metrics; `train` has the metrics only.
        """

    def pop_metric_state(self) -> np.ndarray:
        """Gives the sums that this process's training metrics consist of, and starts them anew. Local.

        Returns:
            A float64 vector; adding it to another group's sums gives the metrics over both's samples.

        Raises:
            UnsupportedError: The metrics are not of that kind.
        """
        raise UnsupportedError(f"{type(self).__name__} does not give its metrics away.")

    def add_metric_state(self, sums: np.ndarray) -> None:
        """Adds what `pop_metric_state` of another group gave to this one's. Local."""
        raise UnsupportedError(f"{type(self).__name__} does not take metrics over.")

    def traits(self) -> list[LayerTrait]:
        """Lists what the model's layers do that bears on whether runs agree. Local."""
        return [LayerTrait(Trait.HIDDEN, "model", type(self).__name__)]

    def plan_notes(self) -> list[str]:
        """What the model or the loss is used for in another way than one might think, for the plan. Local."""
        return []

    def step_notes(self, batch: Batch) -> list[str]:
        """Says what it will honour in its own way in steps on such batches; nothing moves. Local."""
        return []

    def refuses_single_sample(self, batch: Batch) -> str | None:
        """Names a layer that cannot be trained on a slice of one sample, such as the batch's first. Local.

        It may try: nothing moves.
        """
        return None

    def reseed(self, replica: int, step: int) -> None:
        """Has random layers draw from here on what a replica draws in a step. Local.

        A worker of a parameter-server run is asked for it before each slice, so that what is drawn depends
        neither on who computes a slice nor on what that one has computed before: runs that go on draw as if
        never ended.

        Args:
            replica: Whose slice is computed; a worker may get that of another.
            step: Of the run.

        Raises:
            UnsupportedError: Replicas of this kind cannot; they cannot be workers either.
        """
        raise UnsupportedError(f"{type(self).__name__} does not draw by replica and step.")

    def not_checkpointed(self) -> list[str]:
        """Says what a step depends on that `read_state` cannot give: one sentence each. Local."""
        return []

    @abstractmethod
    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        """Tells what `read_state` would give, in the same order, and copies nothing. Local."""

    @abstractmethod
    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        """Copies named state to NumPy. Local.

        Another group of the same backend and replicas that is given, replica by replica, all that this
        one has (`ALL_STATE`) takes the very steps that this one would take.

        Args:
            kinds: Of the state; see `StateKind`.
            replica: One of `local_replicas`; None for the first of them.

        Returns:
            Weights under their path, the rest under `KIND/...`; bfloat16, which NumPy lacks, as float32.
            Of state that lies over the replicas in parts, this replica's part: see `describe_state`.
        """

    def copy_state(
        self,
        kinds: Sequence[StateKind],
        kept: dict[str, np.ndarray],
        *,
        replica: int | None = None,
    ) -> Callable[[], Mapping[str, np.ndarray]]:
        """Begins to copy the state as it is now, for who does so again and again. Local.

        Memory that is there already is filled several times as fast as new one.

        Args:
            kinds: Of the state.
            kept: Empty at first, and the same in every call: the group may keep arrays in it, and give them
                again, filled anew. So what the call before gave must not be read any more.
            replica: As for `read_state`.

        Returns:
            What gives the state, to be called once, on any thread: the group may go on meanwhile, but waits
            for that before it changes what is not copied yet.
        """
        found = self.read_state(kinds, replica=replica)
        return lambda: found

    @abstractmethod
    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        """Sets named state; what it does not name stays. Local.

        Args:
            state: Such as `read_state` gives; or the whole of what this replica has a part of. What only
                other replicas hold is passed over.
            replica: One of `local_replicas`, which alone is set; None for each of them.

        Raises:
            IsotrainError: A name is unknown, a shape does not fit, or the replica is not here.
        """

    def is_remote(self, name: str) -> bool:
        """Whether only other processes hold the state of a name, which `write_state` passes over. Local.

        Nothing of it is then read from a checkpoint here.
        """
        return False

    def local_index(self, replica: int | None) -> int:
        """The place of a replica among `local_replicas`, that of the first for None. Local.

        Raises:
            IsotrainError: It does not live in this process.
        """
        if replica is None:
            return 0
        if replica not in self.local_replicas:
            here = ", ".join(map(str, self.local_replicas))
            raise IsotrainError(
                f"replica: expected one of those that live in this process ({here}), received"
                f" {replica!r}."
            )
        return self.local_replicas.index(replica)

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        """Reads weights from a file of a framework's form; the replicas' own stay as they are. Local.

        Returns:
            Arrays by the names that the file has, or by the model's where it has none.

        Raises:
            IsotrainError: It cannot be read.
            UnsupportedError: It has a form that this group does not know.
        """
        raise UnsupportedError(
            f"initial_weights: {path}: this backend reads weights from .safetensors and .npz files only."
        )

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        """Writes the model, as it is now, in a form that others open. Local; of a group of one replica.

        Args:
            form: One of the adapter's `exports`.
            target: The file or folder to write; its name ends as the form's do.
            inputs: Of a few samples, placed, where they are known: what the model's inputs are like.

        Raises:
            UnsupportedError: This model has no such form.
            SpecError: The inputs are needed, and not known.
        """
        raise UnsupportedError(f"export: this backend writes no {form}.")

    @abstractmethod
    def average_parameters(self) -> None:
        """Replaces every trainable weight by its mean over all replicas, natively."""

    @abstractmethod
    def tensor(self, array: np.ndarray) -> Tensor:
        """Makes a tensor from a NumPy array, keeping its dtype. Local."""

    @abstractmethod
    def numpy(self, tensor: Tensor) -> np.ndarray:
        """Copies a tensor to NumPy, keeping its dtype. Local."""

    def all_reduce(self, values: Sequence[Tensor], op: ReduceOp = "sum") -> list[Tensor]:
        """Reduces tensors of one shape over all replicas; every replica gets the result.

        It is the collective of `Replica`, which has others besides, outside of any computation.
        """
        return self.compute(_all_reduced, values, static=op)

    @property
    def is_single_process(self) -> bool:
        """Whether no other process takes part in the steps. Local."""
        return len(self.local_replicas) == self.replicas

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        """Gives the largest of what every process has in each place, the same on all of them.

        Args:
            numbers: Of this process; equally many on each.
        """
        import numpy as np

        tensor = self.tensor(np.array(numbers, np.float64))
        reduced = self.all_reduce([tensor] * len(self.local_replicas), "max")
        return [float(number) for number in self.numpy(reduced[0])]

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every process has called it."""

    @abstractmethod
    def synchronize_device(self) -> None:
        """Waits until this process's devices have finished all submitted work. Local."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the run cleanly: nothing of it may be used afterwards."""


def _all_reduced(replica: Replica, tensor: Tensor, *, static: ReduceOp) -> Tensor:
    return replica.all_reduce(tensor, static)
