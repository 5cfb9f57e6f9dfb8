"""Sharded data parallelism (ZeRO): optimizer state, gradients and weights sharded over the replicas.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020,
arXiv 1910.02054). In stages 1 and 2 no weight is cut: each belongs to one replica as a whole, so that any
optimizer, and clipping by the norm of a weight, do what they do in data-parallel runs. Hybrid: Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (VLDB 2023, arXiv 2304.11277), section
3.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from isotrain.plugin import (
    SHARD,
    Batch,
    Bucket,
    Capability,
    FullyShardedGroup,
    FullyShardedLayout,
    Hosts,
    Hybrid,
    Invariant,
    ModelBytes,
    ParallelLayout,
    Plan,
    PlanError,
    Reduction,
    Replica,
    ReplicaGroup,
    ShardedGroup,
    ShardedLayout,
    ShardedReplica,
    StateBytes,
    Strategy,
    Tensor,
    TrainingSpec,
    UnsupportedError,
    assign_shards,
    flatten,
    index_within,
    require,
    unflatten,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import average_statistics

_STAGE_3 = frozenset({Capability.SYNCHRONOUS_STEP, Capability.UNSHARD_WEIGHTS})
"""Capabilities that stage 3 requires."""


@dataclass(frozen=True)
class ShardBucket:
    """A bucket of weights, sharded over the replicas of each host.

    Attributes:
        bucket: The weights, and which replica of a host updates which of them.
        hosts: Replicas of each host; a single host unless the run is hybrid.
    """

    bucket: Bucket
    hosts: Hosts

    def index_in_host(self, replica: int) -> int:
        """The index of a replica among those of its host."""
        return index_within(replica, self.hosts)

    @property
    def peers(self) -> Hosts:
        """Replicas that update each non-empty shard: one per host."""
        shards = zip(self.bucket.sizes, zip(*self.hosts, strict=True), strict=True)
        return tuple(replicas for size, replicas in shards if size)


class Sharded(Strategy):
    """Every step, each replica reduces the gradients of its shard, updates it, and all-gathers weights."""

    name = "sharded"
    summary = (
        "synchronous: each replica updates its shard of weights, with optimizer state for it (ZeRO)"
    )
    requires = frozenset(
        {
            Capability.REDUCE_SCATTER_GRADIENTS,
            Capability.COMPUTE,
            Capability.UPDATE_SHARD,
        }
    )
    parallel_layout: ParallelLayout = ShardedLayout()
    keeps_replicas_equal = "always"
    equals_data_parallel = True
    applies_ordered_sums = True
    invariants = frozenset({Invariant.GRADIENT_SUM})
    memory_saving = ({"stage": 1}, {"stage": 2}, {"stage": 3})
    variants = ({"stage": 3}, {"hybrid": True})

    def __init__(
        self,
        stage: int = 1,
        bucket_megabytes: float = 25.0,
        hybrid: bool = False,
        host_size: int | None = None,
    ) -> None:
        """Checks the options.

        Args:
            stage: ZeRO stage, what is sharded: 1, optimizer state; 2, gradients too; 3, weights too.
            bucket_megabytes: Size of the buckets in which gradients or weights are sent.
            hybrid: Whether to shard over the replicas of each host, and replicate over hosts.
            host_size: Number of replicas to treat as one host of a hybrid run; None for the plan's hosts.

        Raises:
            PlanError: An option has a bad value.
        """
        self._stage = option_checks.whole_number(self.name, "stage", stage, 1)
        if stage > 3:
            raise option_checks.option_error(self.name, "stage", "1, 2 or 3", stage)
        self._bucket_bytes = 1e6 * option_checks.positive(
            self.name, "bucket_megabytes", bucket_megabytes
        )
        hosts = self._hybrid(hybrid, host_size)
        self._is_hybrid = hosts is not None
        if stage == 3:
            self.summary = "sharded, weights too: they are gathered where they are needed (FSDP)"
            self.parallel_layout = FullyShardedLayout(int(self._bucket_bytes), hosts)
            self.requires = _STAGE_3 | ({Capability.HYBRID_SHARDING} if hosts else set())
        elif hosts:
            self.summary = "sharded over the replicas of each host, replicated over hosts"
            self.parallel_layout = ShardedLayout(hosts)
            self.requires = self.requires | {Capability.SUBGROUPS}
        self._clips = False
        self._gathers_by_unit = True
        self._shards_gradients = stage > 1
        self._gradient_accumulation_steps = 1
        self._hosts: Hosts = ()
        self._shard_buckets: tuple[ShardBucket, ...] = ()

    def _hybrid(self, hybrid: bool, host_size: int | None) -> Hybrid | None:
        """The layout of hosts of a hybrid run; None of any other."""
        if not option_checks.boolean(self.name, "hybrid", hybrid):
            if host_size is not None:
                raise PlanError(f"strategy {self.name}: host_size is an option of `hybrid: true`.")
            return None
        if host_size is not None:
            option_checks.whole_number(self.name, "host_size", host_size, 1)
        return Hybrid(host_size)

    def validate(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses float16, custom optimizers, and those that need whole weights where these are sharded.

        Raises:
            UnsupportedError: The precision is float16, or the optimizer is such a one.
        """
        option_checks.refuse_float16(self.name, spec, "reduces gradients without a loss scale")
        option_checks.refuse_custom_optimizer(self.name, spec)
        if self._stage == 3 and spec.optimizer.updates_whole_matrices:
            raise UnsupportedError(
                f"strategy {self.name}: optimizer {spec.optimizer.name} needs the whole gradient of a matrix,"
                " and with stage 3 each replica has a shard of it. Use stage 1 or 2."
            )
        if self._stage < 3 or spec.reproducible is None or plan.replicas == 1:
            return []
        if spec.optimizer.name == "lamb":
            raise UnsupportedError(
                f"strategy {self.name}: optimizer lamb takes the norms of weights, and with stage 3 their"
                " squares are added shard by shard, so that reproducible would not keep the bits. Use stage 1"
                " or 2, or leave reproducible out."
            )
        return [
            f"strategy {self.name}: with reproducible, stage 3 gathers all weights once for all parts of a"
            " step: a replica has all weights and gradients in a step, and its shards between steps"
        ]

    def configure(self, spec: TrainingSpec, plan: Plan) -> None:
        """Assigns the weights to replicas.

        Raises:
            PlanError: There are fewer trainable weights than replicas to shard over.
        """
        self._hosts = plan.device_mesh.groups(SHARD)
        self._gradient_accumulation_steps = plan.gradient_accumulation_steps
        self._gathers_by_unit = spec.reproducible is None
        self._shards_gradients = self._stage > 1 and spec.reproducible is None
        if self._stage == 3:
            return
        self._clips = spec.clip is not None and spec.clip.global_norm is not None
        if plan.weight_shapes is not None:
            self._assign_shards(list(map(math.prod, plan.weight_shapes)), plan)

    def _assign_shards(self, sizes: Sequence[int], plan: Plan) -> None:
        shards = len(self._hosts[0])
        if len(sizes) < shards:
            whose = "" if len(self._hosts) == 1 else " of a host"
            raise PlanError(
                f"strategy {self.name}: the model has {len(sizes)} trainable weights, and each of {shards}"
                f" replicas{whose} updates one or more. Use fewer replicas, or strategy data-parallel."
            )
        element_bytes = (plan.gradient_bytes or 0) / sum(sizes)
        assignment = assign_shards(sizes, shards)
        buckets = assignment.buckets(max(1, int(self._bucket_bytes / element_bytes)))
        self._shard_buckets = tuple(ShardBucket(bucket, self._hosts) for bucket in buckets)

    def started(self, group: ReplicaGroup) -> None:
        """Reduces the optimizer state of each replica to that of its shard, in the order of buckets."""
        if self._stage == 3:
            return
        require(group, ShardedGroup).shard_optimizer(
            [
                [
                    index
                    for each in self._shard_buckets
                    for index in each.bucket.weights_of(each.index_in_host(replica))
                ]
                for replica in group.local_replicas
            ]
        )

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Reduce-scatters gradients, updates the local shard, all-gathers weights; returns a scalar loss."""
        if self._stage == 3:
            return group.synchronous_step(batch, learning_rate)
        sharded = cast("ShardedGroup", group)
        gradients, loss = sharded.reduce_scatter_gradients(batch, self._reduction())
        group.compute(average_statistics, *group.replica_weights(batch))
        norms = None
        if self._clips:
            norms = group.compute(global_norm, gradients, static=len(self._hosts))
        sharded.update_shard(gradients, learning_rate, norms)
        group.compute(all_gather_weights, static=self._shard_buckets)
        return loss

    def apply_gradients(
        self, group: ReplicaGroup, gradients: Sequence[Sequence[Tensor]], learning_rate: float
    ) -> None:
        """Updates the local shard, and all-gathers weights in stages 1 and 2: stage 3 does so in a step."""
        group.apply_gradients(gradients, learning_rate)
        if self._stage < 3:
            group.compute(all_gather_weights, static=self._shard_buckets)

    def why_not_elastic(self) -> str:
        """Reason why the others cannot go on: by stage, and for hybrid runs."""
        if self._is_hybrid:
            return (
                "each host has every shard once, so that one which loses a process lacks a shard, and all"
                " hosts need equally many replicas"
            )
        lost = "weights and their optimizer state" if self._stage == 3 else "optimizer state"
        return (
            f"each replica has a shard of the {lost} that no other has, and that of a lost replica is lost"
            " with it"
        )

    @contextmanager
    def evaluating(self, group: ReplicaGroup) -> Iterator[None]:
        """Gathers all weights on all replicas (stage 3)."""
        self._unshard(group)
        yield

    def finished(self, group: ReplicaGroup) -> None:
        """Gathers all weights on all replicas (stage 3)."""
        self._unshard(group)

    def _unshard(self, group: ReplicaGroup) -> None:
        if self._stage == 3 and group.replicas > 1:
            require(group, FullyShardedGroup).unshard_weights()

    def _reduction(self) -> Reduction:
        return Reduction(
            tuple(each.bucket.weights for each in self._shard_buckets),
            self._shard_buckets,
            reduce_bucket,
            each_slice=self._stage > 1,
        )

    def state_bytes(self, model: ModelBytes, replicas: int) -> StateBytes:
        """All weights; the optimizer state of the largest shard; the gradients that the stage keeps."""
        replicated = model.replicated
        shards = self._shard_count(replicas)
        if self._stage == 3:
            return self._fully_sharded_bytes(model, shards)
        assignment = assign_shards(model.weights, shards)
        largest = max(assignment.shard_sizes)
        gradients = replicated.gradients
        if self._shards_gradients:
            buckets = assignment.buckets(int(self._bucket_bytes))
            gradients = min(gradients, largest + max(sum(bucket.sizes) for bucket in buckets))
        return replace(replicated, gradients=gradients, slots=largest * model.slots)

    def _shard_count(self, replicas: int) -> int:
        """Number of shards of a run: that of the last plan, if it had as many replicas."""
        if sum(map(len, self._hosts)) == replicas:
            return len(self._hosts[0])
        return self.parallel_layout.device_mesh(replicas).size(SHARD)

    def _fully_sharded_bytes(self, model: ModelBytes, shards: int) -> StateBytes:
        """A shard of all trainable weights, and one unsharded unit of weights and of gradients.

        With gradient accumulation, gradients stay unsharded between micro-batches; with `reproducible`,
        weights do, too.
        """
        replicated = model.replicated
        trainable = sum(model.weights)
        shard = -(-trainable // shards)
        if not self._gathers_by_unit:
            whole = replicated.weights if shards == 1 else replicated.weights + shard
            return replace(replicated, weights=whole, slots=shard * model.slots)
        unit = min(trainable - shard, max(int(self._bucket_bytes), *model.weights))
        weights = shard + unit + model.fixed
        gradients = shard + unit if self._gradient_accumulation_steps == 1 else replicated.gradients
        return replace(replicated, weights=weights, gradients=gradients, slots=shard * model.slots)

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float | None:
        """Bytes of a reduce-scatter of gradients and an all-gather of weights: as a ring all-reduce.

        A hybrid run adds an all-reduce of the shards between hosts. Stage 2 sends the gradients of each
        micro-batch. Stage 3 is native to the backend, which knows what it sends.
        """
        if self._stage == 3:
            return None
        shards = self._shard_count(replicas)
        inside, between = (shards - 1) / shards, 2 * (1 / shards - 1 / replicas)
        times = self._gradient_accumulation_steps if self._stage == 2 else 1
        reduced = times * (inside + between) * gradient_bytes
        return reduced + self.update_bytes(gradient_bytes, replicas)

    def update_bytes(self, gradient_bytes: int, replicas: int) -> float:
        """Bytes of an all-gather of the updated weights."""
        shards = self._shard_count(replicas)
        return (shards - 1) / shards * gradient_bytes


def reduce_bucket(
    replica: Replica, gradients: list[Tensor], *, static: ShardBucket
) -> list[Tensor]:
    """Mean gradients of this replica's shard of a bucket. Collective.

    Args:
        replica: The replica that runs this computation.
        gradients: Local gradients of all weights of the bucket, in its order, of any shape.
        static: The bucket.
    """
    sizes, counts, hosts = static.bucket.sizes, static.bucket.counts, static.hosts
    vector = flatten(replica.ops, gradients)
    if len(hosts) == 1:
        shard = replica.reduce_scatter(vector, sizes)
    else:
        shard = replica.reduce_scatter_within(vector, sizes, hosts)
        shard = replica.all_reduce_within(shard, static.peers)
    index = static.index_in_host(replica.index)
    start = sum(counts[:index])
    local = gradients[start : start + counts[index]]
    return unflatten(replica.ops, shard / replica.replicas, local) if local else []


def global_norm(replica: Replica, gradients: list[Tensor], *, static: int = 1) -> Tensor:
    """L2 norm of the gradients of all weights: a float64 scalar, bitwise equal on all replicas. Collective.

    Args:
        replica: The replica that runs this computation.
        gradients: Gradients of this replica's shard, of any shape.
        static: Number of replicas that have the same shard.
    """
    vector = replica.ops.reshape(flatten(replica.ops, gradients), (1, -1))
    local = replica.ops.cast(vector @ replica.ops.transpose(vector), "float64")
    squares = replica.all_reduce(local) / static
    return replica.ops.reshape(squares, ()) ** 0.5


def all_gather_weights(replica: Replica, *, static: tuple[ShardBucket, ...]) -> None:
    """Gives all replicas the weights that each has updated, bucket by bucket. Collective."""
    sharded = cast("ShardedReplica", replica)
    for each in static:
        bucket = each.bucket
        shard = sharded.read_weights(bucket.weights_of(each.index_in_host(replica.index)))
        if len(each.hosts) == 1:
            weights = replica.all_gather_shards(shard, bucket.sizes)
        else:
            weights = replica.all_gather_shards_within(shard, bucket.sizes, each.hosts)
        sharded.write_weights(bucket.weights, weights)
