"""The replicas of a run as a device mesh, one device per process, and their collectives.

A tensor of the run is a *global* array: each replica's *local* array is its part along the first axis.
Converting one to the other copies nothing. So that every array has a first axis, scalars are passed as
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
"""Partition along the first axis: every replica has a part of its own."""
EQUAL = PartitionSpec()
"""Replicated: every replica has the same."""

_HEARTBEAT_SECONDS = 30
_SHUTDOWN_SECONDS = 30
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def configure(backend_config: BackendConfig, context: ProcessContext) -> None:
    """Configures JAX for one replica on one device, before anything asks JAX for its devices. Local.

    64-bit types are on in every precision, so that tensors keep the type of the array that they are made
    of; what a model computes in is decided by the types of its weights.
    """
    jax.config.update("jax_enable_x64", True)
    if backend_config.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    else:
        jax.config.update("jax_cuda_visible_devices", str(context.local_rank))


def join(spec: TrainingSpec, backend_config: BackendConfig, context: ProcessContext) -> None:
    """Connects to the other processes. Collective, in runs of several, before any computation."""
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
    with private.gloo_listening_on(context.address[0]):
        jax.devices()  # connects everybody


class Number(NamedTuple):
    """A scalar that is passed as an array with an axis.

    Attributes:
        value: Shape `[1]`.
    """

    value: jax.Array


def packed(tree: Tree) -> Tree:
    """Wraps the scalars among arrays in `Number`."""
    return jax.tree.map(lambda x: x if x.ndim else Number(x.reshape(1)), tree)


def unpacked(tree: Tree) -> Tree:
    """Inverse of `packed`."""
    return jax.tree.map(
        lambda x: x.value[0] if isinstance(x, Number) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Number),
    )


class ReplicaMesh:
    """Device mesh of all replicas; with one replica, of its device alone.

    Attributes:
        replicas: Number of devices in the mesh.
        rank: Index of this process's device.
        part_axis: Name of the mesh axis along which state is sharded; in hybrid runs one of several.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        """Arranges the devices of all processes.

        Args:
            sizes: Sizes of the axes of the run's device mesh, where state is sharded along one of them.
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
        """Copies a NumPy array of any shape to this process's device. Local."""
        return jax.device_put(array, self._device, may_alias=False)

    def lift(self, tree: Tree) -> Tree:
        """Global arrays, first axis times `replicas`, of local ones. Local."""
        return jax.tree.map(self._lift, tree)

    def _lift(self, part: jax.Array) -> jax.Array:
        """Global array of a local one: shape `[replicas * n, ...]` of `[n, ...]`."""
        shape = (self.replicas * part.shape[0], *part.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [part])

    def lower(self, tree: Tree) -> Tree:
        """This process's local arrays of global ones. Local."""
        return jax.tree.map(lambda array: array.addressable_data(0), tree)

    def share(self, array: jax.Array, shape: Sequence[int], spec: PartitionSpec) -> jax.Array:
        """Global array, partitioned as `spec` says, of this process's part of it. Local.

        Args:
            array: The part of this process.
            shape: Shape of the global array.
            spec: Partition: `EQUAL`, or an axis cut along `part_axis`.
        """
        lies = NamedSharding(self._grid, spec)
        return jax.make_array_from_single_device_arrays(tuple(shape), lies, [array])

    def lying(self, array: jax.Array, spec: PartitionSpec) -> jax.Array:
        """The array, any shape, partitioned as `spec` says; in a function compiled for global arrays."""
        return lax.with_sharding_constraint(array, NamedSharding(self._grid, spec))

    def of_each(self, arrays: Tree, cuts: Sequence[int | None]) -> Tree:
        """Arrays cut along these axes, as `by_replica` takes them; within a compiled function.

        A part that several replicas have is there once for each of them.
        """
        return self._seen(arrays, cuts, (self.part_axis, self._grid.axis_names))

    def of_all(self, arrays: Tree, cuts: Sequence[int | None]) -> Tree:
        """Inverse of `of_each`."""
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
        """Compiles a function of one replica, collectives included, to one of global arrays.

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
        """A function of global arrays from one of a replica's parts; not compiled.

        Args:
            function: Gets this replica's parts, and may use the collectives of this module.
            takes: Partition of each argument: a `PartitionSpec`, or a tree of them.
            gives: Partition of the results, likewise.
        """
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=takes, out_specs=gives, check_vma=False
        )

    def mean(self, number: jax.Array) -> jax.Array:
        """Mean of a scalar over all replicas. Collective."""
        return self.lower(self._mean(self.lift(number.reshape(1)))).reshape(())

    def close(self) -> None:
        """Disconnects from the other processes. Collective.

        JAX connects only before it has listed its devices, so the list is cleared for another session.
        """
        if self.replicas > 1:
            jax.distributed.shutdown()
            clear_backends()


def cut_along(cut: int | None, axis: Any = AXIS) -> PartitionSpec:
    """Partition of an array that is cut along one of its axes, or not at all.

    Args:
        cut: Axis of the array; None: it is replicated.
        axis: Name of a mesh axis, or several names.
    """
    return EQUAL if cut is None else PartitionSpec(*[None] * cut, axis)


def all_reduce(value: Tree, op: ReduceOp) -> Tree:
    """All-reduces each array of a tree, any shapes; within a compiled function. Collective."""
    return {"sum": lax.psum, "mean": lax.pmean, "max": lax.pmax}[op](value, AXIS)


def all_gather(value: jax.Array, parts: Subgroups | None = None) -> jax.Array:
    """All-gather over all replicas or a subgroup; within a compiled function. Collective.

    Args:
        value: Array of one shape on all of them.
        parts: Subgroups of one size, of which each replica is in one; None: all replicas.
    """
    return lax.all_gather(value, AXIS, axis_index_groups=parts)


class Hosts(NamedTuple):
    """Subgroups of replicas over which state is sharded, and copied.

    Attributes:
        parts: Subgroups with all shards of a model; None: all replicas are one.
        copies: Subgroups with copies of one shard; None: there are no copies.
    """

    parts: Subgroups | None = None
    copies: Subgroups | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather_shards(shard: jax.Array, axis: int, hosts: Hosts) -> jax.Array:
    """All-gather of an array of any shape along an axis; its gradient is a reduce-scatter. Collective."""
    return lax.all_gather(shard, AXIS, axis=axis, axis_index_groups=hosts.parts, tiled=True)


def sum_part(value: jax.Array, axis: int, parts: Subgroups | None = None) -> jax.Array:
    """Reduce-scatter (sum) of any shape along an axis; within a compiled function. Collective.

    Between CPUs it is an all-to-all: gloo's reduce-scatter, which `lax.psum_scatter` is there, now
    and then gives wrong sums (github.com/jax-ml/jax/issues/40830).

    Args:
        value: Array whose length along the axis is a multiple of the number of replicas.
        axis: Axis along which it is cut.
        parts: Subgroups within which it sums, as `all_gather` takes them.
    """
    if jax.default_backend() != "cpu":
        return lax.psum_scatter(
            value, AXIS, scatter_dimension=axis, axis_index_groups=parts, tiled=True
        )
    size = len(parts[0]) if parts else lax.axis_size(AXIS)
    shares = jnp.stack(jnp.split(value, size, axis))
    return lax.all_to_all(shares, AXIS, split_axis=0, concat_axis=0, axis_index_groups=parts).sum(0)


def sum_of_all(value: jax.Array, axis: int, hosts: Hosts) -> jax.Array:
    """This replica's shard, along an axis, of the sum over all replicas; any shape. Collective."""
    part = sum_part(value, axis, hosts.parts)
    return part if hosts.copies is None else all_reduce_within(part, hosts.copies)


def _joined(part: jax.Array, axis: int, hosts: Hosts) -> tuple[jax.Array, None]:
    """Forward pass of `all_gather_shards`, any shape."""
    return all_gather_shards(part, axis, hosts), None


def _summed(axis: int, hosts: Hosts, _: None, whole: jax.Array) -> tuple[jax.Array]:
    """Backward pass of `all_gather_shards`: the shard of the summed gradient, in the shard's shape."""
    return (sum_of_all(whole, axis, hosts),)


all_gather_shards.defvjp(_joined, _summed)


def of_first(value: jax.Array) -> jax.Array:
    """Broadcast from replica 0, any shape; within a compiled function. Collective."""
    return broadcast_within(value, [range(lax.axis_size(AXIS))])


def all_reduce_within(value: jax.Array, subgroups: Subgroups) -> jax.Array:
    """All-reduce (sum), any shape, within each subgroup; one in none keeps its own. Collective."""
    return lax.psum(value, AXIS, axis_index_groups=_groups(subgroups))


def broadcast_within(value: jax.Array, subgroups: Subgroups) -> jax.Array:
    """Broadcast, any shape, from each subgroup's first replica: the others add zero bits. Collective."""
    groups = _groups(subgroups)
    first = jnp.isin(lax.axis_index(AXIS), jnp.array([group[0] for group in groups]))
    is_truth = value.dtype == jnp.bool_
    bits = value.astype(jnp.uint8) if is_truth else _as_bits(value)
    given = lax.psum(jnp.where(first, bits, jnp.zeros_like(bits)), AXIS, axis_index_groups=groups)
    return given.astype(value.dtype) if is_truth else lax.bitcast_convert_type(given, value.dtype)


def _groups(subgroups: Subgroups) -> list[list[int]]:
    """The subgroups, and every replica that is in none as a subgroup of its own."""
    members = {replica for subgroup in subgroups for replica in subgroup}
    alone = [[replica] for replica in range(lax.axis_size(AXIS)) if replica not in members]
    return [*map(list, subgroups), *alone]


def _as_bits(value: jax.Array) -> jax.Array:
    """The bits of an array as unsigned integers, same shape."""
    return lax.bitcast_convert_type(value, _BITS[value.dtype.itemsize])


def permute(value: jax.Array, destinations: tuple[int, ...]) -> jax.Array:
    """Sends an array of any shape to `destinations[index]`; within a compiled function. Collective."""
    return lax.ppermute(value, AXIS, list(enumerate(destinations)))
