"""Sharded data parallelism: optimizer slots, and gradients, in parts over the replicas.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020,
arXiv 1910.02054). Weights are not cut: each belongs to one replica as a whole, so that any optimizer, and
clipping by the norm of a weight, do what they do in data-parallel runs. Hybrid: Zhao et al., "PyTorch FSDP:
Experiences on Scaling Fully Sharded Data Parallel" (VLDB 2023, arXiv 2304.11277), section 3.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from isotrain.plugin import (
    SHARD,
    Batch,
    Bucket,
    Capability,
    FullyShardedLayout,
    Hosts,
    Hybrid,
    Invariant,
    IsotrainError,
    ModelBytes,
    ParallelLayout,
    Plan,
    PlanError,
    Reduction,
    Replica,
    ReplicaGroup,
    ShardedLayout,
    StateBytes,
    Strategy,
    Tensor,
    TrainingSpec,
    assign_shards,
    index_within,
)
from isotrain.strategies import option_checks
from isotrain.strategies.averaging import average_statistics, weights_of_replicas
from isotrain.strategies.flatten import joined, separated

_FULLY = frozenset({Capability.SYNCHRONOUS_STEP, Capability.UNSHARD_WEIGHTS})
"""What stage 3 takes."""


@dataclass(frozen=True)
class ShardBucket:
    """Weights that travel together, and where.

    Attributes:
        bucket: Shared out over the replicas of a host.
        hosts: All of them; a single one unless the run is hybrid.
    """

    bucket: Bucket
    hosts: Hosts

    def index_in_host(self, replica: int) -> int:
        """Which of the replicas of its host a replica is."""
        return index_within(replica, self.hosts)

    @property
    def same(self) -> Hosts:
        """The replicas that update the same of these weights, one of each host, where they update some."""
        each = zip(self.bucket.sizes, zip(*self.hosts, strict=True), strict=True)
        return tuple(replicas for size, replicas in each if size)


class Sharded(Strategy):
    """Every step, each replica sums the gradients of its own weights, updates these, and tells the others."""

    name = "sharded"
    summary = "synchronous: each replica updates a part of the weights, and keeps slots for it alone (ZeRO)"
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
            stage: What lies in parts: 1, optimizer slots; 2, gradients too; 3, weights too.
            bucket_megabytes: Of gradients or weights that travel together.
            hybrid: Whether parts lie over the replicas of each host, and alike on all hosts.
            host_size: Replicas that count as one host of a hybrid run; None for the hosts of the plan.
        """
        self._stage = option_checks.whole(self.name, "stage", stage, 1)
        if stage > 3:
            raise IsotrainError(
                f"strategy {self.name}: stage: expected 1, 2 or 3, received {stage}."
            )
        self._bucket_bytes = 1e6 * option_checks.positive(
            self.name, "bucket_megabytes", bucket_megabytes
        )
        hosts = self._hybrid(hybrid, host_size)
        if stage == 3:
            self.summary = (
                "sharded, and weights lie in parts too: they are joined where they are needed"
            )
            self.parallel_layout = FullyShardedLayout(int(self._bucket_bytes), hosts)
            self.requires = _FULLY | ({Capability.HYBRID_SHARDING} if hosts else set())
        elif hosts:
            self.summary = "sharded, over the replicas of each host, and alike on all hosts"
            self.parallel_layout = ShardedLayout(hosts)
            self.requires = self.requires | {Capability.SUBGROUPS}
        self._clips = False
        self._gradient_accumulation_steps = 1
        self._hosts: Hosts = ()
        self._shard_buckets: tuple[ShardBucket, ...] = ()

    def _hybrid(self, hybrid: bool, host_size: int | None) -> Hybrid | None:
        if not option_checks.switch(self.name, "hybrid", hybrid):
            if host_size is not None:
                raise PlanError(f"strategy {self.name}: host_size is an option of `hybrid: true`.")
            return None
        if host_size is not None:
            option_checks.whole(self.name, "host_size", host_size, 1)
        return Hybrid(host_size)

    def configure(self, spec: TrainingSpec, plan: Plan) -> list[str]:
        """Refuses loss scaling and an own optimizer; shares the weights out."""
        option_checks.without_loss_scaling(
            self.name, spec, "reduces gradients without a loss scale"
        )
        option_checks.without_own_optimizer(self.name, spec)
        self._hosts = plan.device_mesh.groups(SHARD)
        self._gradient_accumulation_steps = plan.gradient_accumulation_steps
        if self._stage == 3:
            return []
        self._clips = spec.clip is not None and spec.clip.global_norm is not None
        if plan.weight_shapes is not None:
            self._assign_shards(list(map(math.prod, plan.weight_shapes)), plan)
        return []

    def _assign_shards(self, sizes: Sequence[int], plan: Plan) -> None:
        parts = len(self._hosts[0])
        if len(sizes) < parts:
            whose = "" if len(self._hosts) == 1 else " of a host"
            raise PlanError(
                f"strategy {self.name}: the model has {len(sizes)} trainable weights, and each of"
                f" {parts} replicas{whose} updates one or more. Use fewer replicas, or strategy"
                " data-parallel."
            )
        width = (plan.gradient_bytes or 0) / sum(sizes)
        shares = assign_shards(sizes, parts)
        buckets = shares.buckets(max(1, int(self._bucket_bytes / width)))
        self._shard_buckets = tuple(ShardBucket(bucket, self._hosts) for bucket in buckets)

    def started(self, group: ReplicaGroup) -> None:
        """Leaves each replica the slots of its own weights, in the order of the buckets."""
        if self._stage == 3:
            return
        group.shard_optimizer(
            [
                [
                    place
                    for lot in self._shard_buckets
                    for place in lot.bucket.weights_of(lot.index_in_host(replica))
                ]
                for replica in group.local_replicas
            ]
        )

    def step(self, group: ReplicaGroup, batch: Batch, learning_rate: float) -> Tensor:
        """Sums gradients in parts, updates the own weights, and joins the weights of all."""
        if self._stage == 3:
            return group.synchronous_step(batch, learning_rate)
        found, loss = group.reduce_scatter_gradients(batch, self._reduction())
        group.compute(agree_on_statistics, *weights_of_replicas(group, batch))
        norms = None
        if self._clips:
            norms = group.compute(norm_of_all, found, static=len(self._hosts))
        group.update_shard(found, learning_rate, norms)
        group.compute(all_gather_weights, static=self._shard_buckets)
        return loss

    @contextmanager
    def evaluating(self, group: ReplicaGroup) -> Iterator[None]:
        """Has all weights on all replicas."""
        self._gather(group)
        yield

    def finished(self, group: ReplicaGroup) -> None:
        """Leaves all weights on all replicas."""
        self._gather(group)

    def _gather(self, group: ReplicaGroup) -> None:
        if self._stage == 3 and group.replicas > 1:
            group.unshard_weights()

    def _reduction(self) -> Reduction:
        return Reduction(
            tuple(lot.bucket.weights for lot in self._shard_buckets),
            self._shard_buckets,
            reduce_bucket,
            each_slice=self._stage > 1,
        )

    def state_bytes(self, model: ModelBytes, replicas: int) -> StateBytes:
        """All weights; the slots of the largest share; and as many gradients as the stage leaves."""
        whole = model.replicated
        parts = self._parts_of(replicas)
        if self._stage == 3:
            return self._parts_bytes(model, parts)
        shared_out = assign_shards(model.weights, parts)
        largest = max(shared_out.shard_sizes)
        gradients = whole.gradients
        if self._stage > 1:
            buckets = shared_out.buckets(int(self._bucket_bytes))
            gradients = min(gradients, largest + max(sum(bucket.sizes) for bucket in buckets))
        return replace(whole, gradients=gradients, slots=largest * model.slots)

    def _parts_of(self, replicas: int) -> int:
        """In how many parts the state of so many lies: of those that the last plan had, or of others."""
        if sum(map(len, self._hosts)) == replicas:
            return len(self._hosts[0])
        return self.parallel_layout.device_mesh(replicas).size(SHARD)

    def _parts_bytes(self, model: ModelBytes, parts: int) -> StateBytes:
        """A part of all that is trained; and of weights and gradients what a pass has whole besides.

        From one micro-batch to the next, gradients are kept whole.
        """
        whole = model.replicated
        trained = sum(model.weights)
        part = -(-trained // parts)
        unit = min(trained - part, max(int(self._bucket_bytes), *model.weights))
        weights = part + unit + model.fixed
        gradients = part + unit if self._gradient_accumulation_steps == 1 else whole.gradients
        return replace(whole, weights=weights, gradients=gradients, slots=part * model.slots)

    def exchanged_bytes(self, gradient_bytes: int, replicas: int) -> float | None:
        """Gradients go to those who update, and weights to all: as much as in an optimal all-reduce.

        So it is with the all-reduce of the parts between hosts, where these have the same. Stage 2 sends the
        gradients of each micro-batch. What stage 3 sends the backend knows, whose own mechanism it is.
        """
        if self._stage == 3:
            return None
        parts = self._parts_of(replicas)
        inside, between = (parts - 1) / parts, 2 * (1 / parts - 1 / replicas)
        times = self._gradient_accumulation_steps if self._stage == 2 else 1
        return (times * (inside + between) + inside) * gradient_bytes


def reduce_bucket(
    replica: Replica, gradients: list[Tensor], *, static: ShardBucket
) -> list[Tensor]:
    """The means of the gradients of this replica's weights in a bucket."""
    sizes, counts, hosts = static.bucket.sizes, static.bucket.counts, static.hosts
    vector = joined(replica.ops, gradients)
    if len(hosts) == 1:
        part = replica.reduce_scatter(vector, sizes)
    else:
        part = replica.reduce_scatter_within(vector, sizes, hosts)
        part = replica.all_reduce_within(part, static.same)
    place = static.index_in_host(replica.index)
    start = sum(counts[:place])
    own = gradients[start : start + counts[place]]
    return separated(replica.ops, part / replica.replicas, own) if own else []


def norm_of_all(replica: Replica, gradients: list[Tensor], *, static: int = 1) -> Tensor:
    """The norm of the gradients of all weights, of which each replica has its own; a float64.

    Args:
        replica: Any; all call it, so that all get the same bits.
        gradients: Of its weights.
        static: How many replicas have the same.
    """
    vector = replica.ops.reshape(joined(replica.ops, gradients), (1, -1))
    own = replica.ops.cast(vector @ replica.ops.transpose(vector), "float64")
    squares = replica.all_reduce(own) / static
    return replica.ops.reshape(squares, ()) ** 0.5


def agree_on_statistics(replica: Replica, weight: Tensor | None = None) -> None:
    """Averages moving statistics over the replicas, as a synchronised step does."""
    average_statistics(replica, weight)


def all_gather_weights(replica: Replica, *, static: tuple[ShardBucket, ...]) -> None:
    """Gives all replicas the weights that each has updated."""
    for lot in static:
        bucket = lot.bucket
        own = replica.read_weights(bucket.weights_of(lot.index_in_host(replica.index)))
        if len(lot.hosts) == 1:
            whole = replica.all_gather_shards(own, bucket.sizes)
        else:
            whole = replica.all_gather_shards_within(own, bucket.sizes, lot.hosts)
        replica.write_weights(bucket.weights, whole)
