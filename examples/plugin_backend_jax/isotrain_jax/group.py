"""The replica group of one JAX process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isotrain.plugin import (
    MODEL_STATE,
    Batch,
    Computation,
    ExportForm,
    LayerTrait,
    Phase,
    ReplicaGroup,
    StateInfo,
    StateKind,
    TrainingSpec,
    keras_files,
    keras_layer_traits,
    keras_model,
    keras_private,
    map_tree,
    weight_files,
)
from isotrain_jax import mesh
from isotrain_jax.mesh import EACH, EQUAL, ReplicaMesh
from isotrain_jax.program import Arrays, MicroBatch, ReplicaTrainer, State
from isotrain_jax.replica import JaxReplica
from isotrain_jax.state import Names, shifted, to_numpy

_CACHED_ARRAYS = 256


class JaxReplicaGroup(ReplicaGroup):
    """Group of one replica: its state, and the compiled functions that change it.

    The state is kept as global arrays, which the synchronous step takes and returns as they are.
    """

    def __init__(self, spec: TrainingSpec, ties: ReplicaMesh) -> None:
        """Builds the model. Collective, after the rendezvous.

        Args:
            spec: Training spec.
            ties: Device mesh of all replicas.
        """
        self._mesh = ties
        self.replicas = ties.replicas
        self.local_replicas = (ties.rank,)
        self._program = program = ReplicaTrainer(spec)
        self._names = Names(program, ties.rank)
        self._of_first = Names(program, rank=0)
        self._state: State = ties.lift(program.initial_state())
        self._evaluated = program.nothing_evaluated()
        self._precision = spec.precision
        self._rate_type = np.float64 if spec.precision == "float64" else np.float32
        self._numbers: dict[Any, jax.Array] = {}
        self._computations: dict[Any, Callable[..., Any]] = {}
        self._step = ties.compile(self._even_step, (EACH, EQUAL), donated=[0])
        self._finish = ties.compile(self._exchange_and_apply, (EACH, EQUAL), donated=[0])
        self._sum = ties.compile(functools.partial(mesh.all_reduce, op="sum"), EQUAL)
        self._mean = ties.compile(functools.partial(mesh.all_reduce, op="mean"), EACH)
        self._contribution = jax.jit(program.contribution)
        self._local_update = jax.jit(program.local_update)
        self._unscaled = jax.jit(program.unscaled)
        self._apply = jax.jit(self._rescale_and_apply)
        self._evaluate = jax.jit(program.evaluate)
        self._predict = jax.jit(program.predict)
        self._start_alike()

    def _start_alike(self) -> None:
        """Broadcasts the weights of replica 0, and gives each replica seeds of its own."""
        if self.replicas > 1:
            weights = (self._state.trainable, self._state.others)
            alike = self._mesh.compile(functools.partial(jax.tree.map, mesh.of_first))(weights)
            self._state = self._state._replace(trainable=alike[0], others=alike[1])
        others = self._of_first.read(self._local_state(), ("non-trainable",))
        self._first_seeds = {n: seed for n, seed in others.items() if keras_private.is_seed(n)}
        self.write_state(others)

    def reseed(self, replica: int, step: int) -> None:
        shift = keras_model.seed_offset(replica, step)
        moved = {name: shifted(name, seed, shift) for name, seed in self._first_seeds.items()}
        written = self._of_first.written(self._local_state(), moved, self._mesh.place)
        self._state = self._lifted(written)

    def _local_state(self) -> State:
        """The local state: this process's part of the global state."""
        return self._mesh.lower(self._state)

    def _computing_state(self) -> State:
        """The local state with which passes through the model compute."""
        return self._local_state()

    def _lifted(self, state: State) -> State:
        """The global state of which this process has the local one."""
        lifted: State = self._mesh.lift(state)
        return lifted

    def _after_pass(self, state: State) -> State:
        """The global state after a local pass that ended with this state."""
        return self._lifted(state)

    @property
    def model(self) -> Any:
        """The model of this process's replica, with its current weights."""
        state, variables = self._computing_state(), self._program.variables
        for part in ("trainable", "others"):
            for variable, value in zip(getattr(variables, part), getattr(state, part), strict=True):
                variable.assign(jnp.copy(value).reshape(variable.shape))
        return self._program.model

    def to_device(self, arrays: Any) -> Any:
        return map_tree(self._mesh.place, arrays)

    def optimizer_lr_schedule(self) -> Callable[[int], float] | None:
        return self._program.optimizer_lr_schedule

    def synchronous_step(self, batch: Batch, learning_rate: float) -> jax.Array:
        pieces, weights, rate = slices(batch), self._weights(batch), self._rate(learning_rate)
        if batch.even:
            data = self._mesh.lift((pieces, weights, rate))
            self._state, loss = self._step(self._state, *data)
        else:  # Slices differ in size: what the processes compile together must not see them.
            loss, gradients, state = self._contributed(pieces, weights)
            own = self._mesh.lift((jnp.atleast_1d(loss), gradients, weights, rate))
            self._state, loss = self._finish(self._after_pass(state), *own)
        return self._mesh.lower(loss)

    def _even_step(
        self, state: State, pieces: Sequence[MicroBatch], weights: jax.Array, rate: jax.Array
    ) -> tuple[State, jax.Array]:
        """One replica's synchronous step: its new state, and the mean loss, a scalar."""
        loss, gradients, state = self._program.contribution(state, pieces, weights)
        return self._exchange_and_apply(state, loss, gradients, weights, rate)

    def _exchange_and_apply(
        self,
        state: State,
        loss: jax.Array,
        gradients: Arrays,
        weights: jax.Array,
        rate: jax.Array,
    ) -> tuple[State, jax.Array]:
        """Averages loss (scalar), gradients and moving statistics, and updates the weights. Collective."""
        state, loss, gradients = self._exchanged(state, loss, gradients, weights)
        return self._program.apply(state, gradients, rate), loss.reshape(())

    def _exchanged(
        self, state: State, loss: jax.Array, gradients: Arrays, weights: jax.Array
    ) -> tuple[State, jax.Array, Arrays]:
        """Averages loss (a scalar), gradients and moving statistics over the replicas."""
        others, moved = list(state.others), self._program.statistics
        shares = [others[place] * weights.sum().astype(others[place].dtype) for place in moved]
        if self.replicas > 1:
            loss, gradients, means = mesh.all_reduce((loss, gradients, shares), "mean")
            for place, mean in zip(moved, means, strict=True):
                others[place] = mean
        return state._replace(others=others), loss, gradients

    def _contributed(
        self, pieces: Sequence[MicroBatch], weights: jax.Array
    ) -> tuple[jax.Array, Arrays, State]:
        """This replica's contribution, shapes as in `ReplicaTrainer.contribution`, without kept gradients."""
        state = self._computing_state()
        loss, gradients, after = self._contribution(state._replace(kept=[]), pieces, weights)
        return loss, gradients, after._replace(kept=state.kept)

    def local_step(self, batch: Batch, learning_rate: float) -> jax.Array:
        weights = [piece.weight for piece in batch.slices[0]]
        share = sum(weights)
        own = tuple(weight / share if share else 0.0 for weight in weights)
        loss, gradients, after = self._contributed(slices(batch), self._numbers_of(own))
        given = (after, loss, gradients, self._numbers_of((share,)), self._rate(learning_rate))
        state, loss = self._local_update(self._local_state(), *given)
        self._state = self._mesh.lift(state)
        return self._mesh.mean(loss)

    def gradients(self, batch: Batch) -> tuple[list[list[jax.Array]], jax.Array]:
        loss, gradients, state = self._contributed(slices(batch), self._weights(batch))
        self._state = self._mesh.lift(state)
        mean = self._mesh.mean(loss)
        return [self._unscaled(state, gradients)], mean

    def apply_gradients(
        self, gradients: Sequence[Sequence[jax.Array]], learning_rate: float
    ) -> None:
        rate = self._rate(learning_rate)
        self._state = self._mesh.lift(self._apply(self._local_state(), list(gradients[0]), rate))

    def _rescale_and_apply(self, state: State, gradients: Arrays, rate: jax.Array) -> State:
        """Applies unscaled gradients, in the weights' shapes."""
        return self._program.apply(state, self._program.rescaled(state, gradients), rate)

    @contextlib.contextmanager
    def preserving_training_state(self) -> Iterator[None]:
        state = self._local_state()
        before = jax.tree.map(jnp.copy, (state.others, state.metrics))
        try:
            yield
        finally:
            others, metrics = self._mesh.lift(before)
            self._state = self._state._replace(others=others, metrics=metrics)

    def keep_gradients(self) -> bool:
        self._state = self._mesh.lift(self._program.keeping_gradients(self._local_state()))
        return True

    def kept_gradients(self) -> list[list[jax.Array]]:
        kept = self._program.kept_gradients(self._local_state())
        return [list(map(jnp.copy, kept))]  # the next step takes the memory of its state

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        key = (computation, static)
        if key not in self._computations:
            options = {} if static is None else {"static": static}

            def function(state: State, given: Any) -> tuple[State, Any]:
                replica = JaxReplica(self._program, self._mesh, state)
                result = computation(replica, *mesh.unpacked(given), **options)
                return replica.state, mesh.packed(result)

            self._computations[key] = self._mesh.compile(function, donated=[0])
        given = self._mesh.lift(mesh.packed([own for (own,) in values]))
        self._state, result = self._computations[key](self._state, given)
        return [mesh.unpacked(self._mesh.lower(result))]

    def evaluation_step(self, batch: Batch) -> None:
        counts = self._numbers_of(tuple(float(piece.count) for piece in batch.slices[0]))
        given = (self._computing_state(), self._evaluated, slices(batch), counts)
        self._evaluated = self._evaluate(*given)

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        return [self._predict(self._computing_state(), own) for own in inputs]

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        program, ties = self._program, self._mesh
        if phase == "train":
            sums = ties.lower(self._sum(self._state.metrics))
            self._state = self._state._replace(metrics=ties.lift(program.metrics_at_start()))
            return program.training_results(sums)
        evaluated = ties.lower(self._sum(ties.lift(self._evaluated)))
        self._evaluated = program.nothing_evaluated()
        return program.evaluation_results(evaluated)

    def pop_metric_state(self) -> np.ndarray:
        sums = [np.ravel(to_numpy(value)) for value in self._local_state().metrics]
        start = self._mesh.lift(self._program.metrics_at_start())
        self._state = self._state._replace(metrics=start)
        return np.concatenate([np.zeros(0), *sums]).astype(np.float64)

    def add_metric_state(self, sums: np.ndarray) -> None:
        own = self._local_state().metrics
        parts = np.split(sums, np.cumsum([value.size for value in own])[:-1]) if own else []
        added = [
            value + self._mesh.place(part.reshape(value.shape).astype(value.dtype))
            for value, part in zip(own, parts, strict=True)
        ]
        self._state = self._state._replace(metrics=self._mesh.lift(added))

    def traits(self) -> list[LayerTrait]:
        return keras_layer_traits.model_traits(self._program.model, self._precision)

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        self.local_index(replica)
        return self._names.described(self._local_state(), kinds)

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        self.local_index(replica)
        return self._names.read(self._local_state(), kinds)

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        self.local_index(replica)
        written = self._names.written(self._local_state(), state, self._mesh.place)
        self._state = self._lifted(written)

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        return weight_files.load_weight_arrays(path, self._program.model)

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        keras_files.write(self.model, form, target)

    def average_parameters(self) -> None:
        self._state = self._state._replace(trainable=self._mean(self._state.trainable))

    def numpy(self, tensor: jax.Array) -> np.ndarray:
        return to_numpy(tensor)

    def synchronize_device(self) -> None:
        jax.block_until_ready(self._state)

    def close(self) -> None:
        self.barrier()
        self._mesh.close()

    def _weights(self, batch: Batch) -> jax.Array:
        """Slice weights of the local replica, shape `[slices]`."""
        return self._numbers_of(tuple(piece.weight for piece in batch.slices[0]))

    def _rate(self, rate: float) -> jax.Array:
        """Learning rate as an array of shape `[1]`."""
        return self._numbers_of((self._rate_type(rate),))

    def _numbers_of(self, values: tuple[Any, ...]) -> jax.Array:
        """An array on the device of a few numbers, made once; float64 unless they are of NumPy."""
        key = (type(values[0]), values)
        array = self._numbers.get(key)
        if array is None:
            if len(self._numbers) >= _CACHED_ARRAYS:
                self._numbers.clear()
            array = self._numbers[key] = self._mesh.place(np.array(values))
        return array


def slices(batch: Batch) -> tuple[MicroBatch, ...]:
    """Inputs and targets of the local replica's slices, in order, shapes `[samples, ...]`."""
    return tuple([(piece.inputs, piece.targets) for piece in batch.slices[0]])
