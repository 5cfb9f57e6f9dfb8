"""The replicas of a run as a mesh of devices, one per process; the exchange between them.

A tensor of the run is a *global* array: every replica's own *local* array is its part along the first axis.
Nothing is copied on the way from one to the other. So that every array has a first axis, numbers travel as
arrays of shape `[1]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.backend import clear_backends
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isotrain.plugin import SHARD, BackendConfig, ProcessContext, ReduceOp, Subgroups, TrainingSpec
from isotrain_jax import private

Tree: TypeAlias = Any
"""Arrays in tuples, lists and dicts."""

AXIS = "replica"
EACH = PartitionSpec(AXIS)
"""Every replica has a part of its own."""
EQUAL = PartitionSpec()
"""Every replica has the same."""

_HEARTBEAT_SECONDS = 30
_SHUTDOWN_SECONDS = 30
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def configure(backend_config: BackendConfig, context: ProcessContext) -> None:
    """Sets JAX up for one replica on one device; before anything asks JAX for its devices.

    64-bit types are on in every precision, so that tensors keep the type of the array that they are made
    of; what a model computes in is decided by the types of its weights.
    """
    jax.config.update("jax_enable_x64", True)
    if backend_config.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    else:
        jax.config.update("jax_cuda_visible_devices", str(context.local_rank))


def join(spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext) -> None:
    """Joins the other processes; called by every process of a run with several, before any computation."""
    host, port = context.rendezvous
    jax.distributed.initialize(
        coordinator_address=f"{host}:{port}",
        coordinator_bind_address=f"{host}:{port}",  # JAX alone would listen on every interface
        num_processes=context.world_size,
        process_id=context.rank,
        cluster_detection_method="deactivate",
        initialization_timeout=int(spec.timeouts.start),
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
    with private.gloo_listening_on(context.local_peer.address):
        jax.devices()  # connects everybody


class Number(NamedTuple):
    """A number on its way.

    Attributes:
        value: Shape `[1]`.
    """

    value: jax.Array


def packed(tree: Tree) -> Tree:
    """Puts `Number` around the numbers among arrays."""
    return jax.tree.map(lambda x: x if x.ndim else Number(x.reshape(1)), tree)


def unpacked(tree: Tree) -> Tree:
    """Undoes `packed`."""
    return jax.tree.map(
        lambda x: x.value[0] if isinstance(x, Number) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Number),
    )


class ReplicaMesh:
    """Every replica's device. With one replica it is that device alone, and nothing is exchanged.

    Attributes:
        replicas: Devices in the mesh.
        rank: Which of them is this process's.
        part_axis: The axis along which state lies in parts; in hybrid runs one of several.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        """Arranges the devices of all processes.

        Args:
            sizes: Of the axes of the run's mesh, where state lies in parts along one of them.
        """
        first = {device.process_index: device for device in reversed(jax.devices())}
        devices = [first[process] for process in sorted(first)]
        self.replicas = len(devices)
        self.rank = jax.process_index()
        self._device = devices[self.rank]
        self._mesh = self._grid = Mesh(devices, (AXIS,))
        self.part_axis = AXIS
        if sizes is not None and len(sizes) > 1:
            self.part_axis = SHARD
            self._grid = Mesh(np.reshape(devices, list(sizes.values())), tuple(sizes))
        self._sharding = NamedSharding(self._mesh, EACH)
        self._mean = self.compile(functools.partial(all_reduce, op="mean"), EQUAL)

    def place(self, array: Any) -> jax.Array:
        """Copies a NumPy array to this process's device."""
        return jax.device_put(array, self._device, may_alias=False)

    def lift(self, tree: Tree) -> Tree:
        """Makes global arrays of local ones; local."""
        return jax.tree.map(self._lift, tree)

    def _lift(self, part: jax.Array) -> jax.Array:
        shape = (self.replicas * part.shape[0], *part.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [part])

    def lower(self, tree: Tree) -> Tree:
        """Gives this process's part of global arrays; local."""
        return jax.tree.map(lambda array: array.addressable_data(0), tree)

    def share(self, array: jax.Array, shape: Sequence[int], spec: PartitionSpec) -> jax.Array:
        """Makes a global array that lies as `spec` says of what this process has of it; local.

        Args:
            array: The part of this process.
            shape: Of the whole.
            spec: `EQUAL`, or which axis is cut along `part_axis`.
        """
        lies = NamedSharding(self._grid, spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), lies, [array])

    def lying(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """The same array, lying as `spec` says; within a function that is compiled for global arrays."""
        return lax.with_sharding_constraint(array, NamedSharding(self._grid, spec))

    def of_each(self, arrays: Tree, cuts: Sequence[int | None]) -> Tree:
        """Arrays that are cut along these axes, as `by_replica` takes them; within a compiled function.

        Where several replicas have the same part, it stands there for each of them.
        """
        return self._seen(arrays, cuts, (self.part_axis, self._grid.axis_names))

    def of_all(self, arrays: Tree, cuts: Sequence[int | None]) -> Tree:
        """Undoes `of_each`."""
        return self._seen(arrays, cuts, (self._grid.axis_names, self.part_axis))

    def _seen(self, arrays: Tree, cuts: Sequence[int | None], axes: tuple[Any, Any]) -> Tree:
        if self._grid is self._mesh:
            return arrays
        takes, gives = ([cut_along(cut, axis) for cut in cuts] for axis in axes)
        seen = jax.shard_map(
            list, mesh=self._grid, in_specs=(takes,), out_specs=gives, check_vma=False
        )
        return seen(arrays)

    def compile(
        self, function: Callable[..., Any], gives: Any = EACH, donated: Sequence[int] = ()
    ) -> Callable[..., Any]:
        """Compiles what every replica does, exchanges included.

        Args:
            function: Gets this replica's parts, and may use the collectives of this module.
            gives: `EACH` or `EQUAL` for what it returns, or a tuple of them.
            donated: Positions of arguments whose memory may be reused for the results.

        Returns:
            The function of global arrays; called by every process.
        """
        return jax.jit(self.by_replica(function, EACH, gives), donate_argnums=donated)

    def by_replica(
        self, function: Callable[..., Any], takes: Any, gives: Any
    ) -> Callable[..., Any]:
        """A function of global arrays, of what every replica does with its parts; not compiled.

        Args:
            function: Gets this replica's parts, and may use the collectives of this module.
            takes: How each argument lies: a `PartitionSpec`, or a tree of them.
            gives: Likewise for what it returns.
        """
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=takes, out_specs=gives, check_vma=False
        )

    def mean(self, number: jax.Array) -> jax.Array:
        """The mean over all replicas of a number (shape `[]`); called by every process."""
        return self.lower(self._mean(self.lift(number.reshape(1)))).reshape(())

    def close(self) -> None:
        """Leaves the other processes; called by every process, once nobody waits for anybody.

        JAX joins others only before it has found its devices, which another session asks of it again.
        """
        if self.replicas > 1:
            jax.distributed.shutdown()
            clear_backends()


def cut_along(cut: int | None, axis: Any = AXIS) -> PartitionSpec:
    """How an array lies that is cut along an axis of its own, or not at all.

    Args:
        cut: This axis; None: all have all of it.
        axis: Of the mesh, or several of them.
    """
    return EQUAL if cut is None else PartitionSpec(*[None] * cut, axis)


def all_reduce(value: Tree, op: ReduceOp) -> Tree:
    """Reduces each array of a tree over all replicas; within a compiled function."""
    return {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax}[op](value, AXIS)


def all_gather(value: jax.Array, parts: Subgroups | None = None) -> jax.Array:
    """Stacks the arrays of all replicas, or of those of the own part; within a compiled function.

    Args:
        value: Of one shape in all of them.
        parts: Each replica is in one of them, and they are of one size.
    """
    return lax.all_gather(value, AXIS, axis_index_groups=parts)


class Hosts(NamedTuple):
    """Over whom state lies in parts.

    Attributes:
        parts: Replicas that have all parts together; None: only all of them do.
        copies: Replicas that have the same part; None: none do.
    """

    parts: Subgroups | None = None
    copies: Subgroups | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather_shards(shard: jax.Array, axis: int, hosts: Hosts) -> jax.Array:
    """The whole of which each replica has a part along an axis; its gradient is summed over all of them."""
    return lax.all_gather(shard, AXIS, axis=axis, axis_index_groups=hosts.parts, tiled=True)


def sum_part(value: jax.Array, axis: int, parts: Subgroups | None = None) -> jax.Array:
    """This replica's share, along an axis, of the sum over all replicas; within a compiled function.

    Between CPUs each sends the shares to each: gloo's reduce-scatter, which `lax.psum_scatter` is there, now
    and then gives wrong sums (github.com/jax-ml/jax/issues/40830).

    Args:
        value: Each share of it is as long along the axis.
        axis: Along which it is cut.
        parts: Sums over the replicas of the own part only; as `all_gather` takes them.
    """
    if jax.default_backend() != "cpu":
        return lax.psum_scatter(
            value, AXIS, scatter_dimension=axis, axis_index_groups=parts, tiled=True
        )
    size = len(parts[0]) if parts else lax.axis_size(AXIS)
    shares = jnp.stack(jnp.split(value, size, axis))
    return lax.all_to_all(shares, AXIS, split_axis=0, concat_axis=0, axis_index_groups=parts).sum(0)


def sum_of_all(value: jax.Array, axis: int, hosts: Hosts) -> jax.Array:
    """This replica's part, along an axis, of the sum over all replicas; within a compiled function."""
    part = sum_part(value, axis, hosts.parts)
    return part if hosts.copies is None else all_reduce_within(part, hosts.copies)


def _joined(part: jax.Array, axis: int, hosts: Hosts) -> tuple[jax.Array, None]:
    return all_gather_shards(part, axis, hosts), None


def _summed(axis: int, hosts: Hosts, _: None, whole: jax.Array) -> tuple[jax.Array]:
    return (sum_of_all(whole, axis, hosts),)


all_gather_shards.defvjp(_joined, _summed)


def of_first(value: jax.Array) -> jax.Array:
    """Gives every replica the array of replica 0; within a compiled function."""
    return broadcast_within(value, [range(lax.axis_size(AXIS))])


def all_reduce_within(value: jax.Array, subgroups: Subgroups) -> jax.Array:
    """Sums over the replicas of each part; one that is in no part keeps its own."""
    return lax.psum(value, AXIS, axis_index_groups=_groups(subgroups))


def broadcast_within(value: jax.Array, subgroups: Subgroups) -> jax.Array:
    """Gives each part the array of its first replica, bit by bit: the others add zero bits."""
    groups = _groups(subgroups)
    first = jnp.isin(lax.axis_index(AXIS), jnp.array([group[0] for group in groups]))
    is_truth = value.dtype == jnp.bool_
    bits = value.astype(jnp.uint8) if is_truth else _as_bits(value)
    given = lax.psum(jnp.where(first, bits, jnp.zeros_like(bits)), AXIS, axis_index_groups=groups)
    return given.astype(value.dtype) if is_truth else lax.bitcast_convert_type(given, value.dtype)


def _groups(subgroups: Subgroups) -> list[list[int]]:
    """The parts, and every replica that is in none as a part of its own."""
    members = {replica for subgroup in subgroups for replica in subgroup}
    alone = [[replica] for replica in range(lax.axis_size(AXIS)) if replica not in members]
    return [*map(list, subgroups), *alone]


def _as_bits(value: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(value, _BITS[value.dtype.itemsize])


def permute(value: jax.Array, destinations: tuple[int, ...]) -> jax.Array:
    """Sends to the replica of `destinations` that stands at the own place; within a compiled function."""
    return lax.ppermute(value, AXIS, list(enumerate(destinations)))
