"""Steps of `reproducible` runs: everything is summed over the parts of the global batch in one order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from isotrain.core.contracts.backend.group_hooks import Trait
from isotrain.core.contracts.backend.group_protocols import OrderedSumsGroup
from isotrain.core.contracts.backend.protocol_checks import require
from isotrain.core.contracts.backend.replica import Tensor
from isotrain.core.contracts.backend.replica_group import ReplicaGroup
from isotrain.core.contracts.backend.tree_sum import SumTree, sum_over_replicas
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.data.sampler import part_bounds
from isotrain.core.errors import UnsupportedError, first_of
from isotrain.core.session.training.outlier_parts import OutlierParts
from isotrain.core.session.training.part_shares import PartShares
from isotrain.core.session.training.verified_parts import Row, VerifiedParts
from isotrain.core.spec.training_spec import TrainingSpec

_MAX_LAYERS = 6
_DRAWS = "draw random numbers by replica. Set random_layers: per-sample"
_SUMS = "sum statistics over replicas in no fixed order. Take these layers out of the model"


class OrderedSteps:
    """Gradients and evaluation steps whose bits do not depend on the number of replicas. Collective."""

    def __init__(
        self,
        group: ReplicaGroup,
        shares: PartShares | None = None,
        outliers: OutlierParts | None = None,
        verified: VerifiedParts | None = None,
    ) -> None:
        """Takes the replica group of this process in a run with `reproducible`.

        Args:
            group: Replica group.
            shares: Shares that are dealt by the speeds of steps; None: equal ones.
            outliers: Filter of the parts of steps; None: all are in.
            verified: Compares the parts that all replicas compute; None where no batch has such.
        """
        self._group = group
        self._ordered = require(group, OrderedSumsGroup)
        self._shares = shares
        self._outliers = outliers
        self._verified = verified
        self._weights = len(group.describe_state(("trainable",)))

    def gradients(self, batch: Batch) -> tuple[list[list[Tensor]], Tensor]:
        """Mean gradients over the global batch, and its loss, as `Session.gradients`."""
        part_sums: Iterable[Row] = self._ordered.part_sums(self.fractions(batch))
        if batch.verified is not None and self._verified is not None:
            part_sums = self._verified.observed(batch, part_sums)
        if self._outliers is None:
            trees = self._trees(batch, part_sums)
            with self._exchanging(batch):
                totals = self._total(batch, trees)
        else:
            rows = list(part_sums)
            with self._exchanging(batch):
                kept, factor = self._outliers.drop(batch, rows)
                totals = self._total(batch, self._trees(batch, kept))
            totals = self._outliers.scaled(totals, factor)
        count = self._weights
        self._ordered.add_part_sums("train", [sums[count + 1 :] for sums in totals])
        return [sums[:count] for sums in totals], totals[0][count]

    @contextmanager
    def _exchanging(self, batch: Batch) -> Iterator[None]:
        """Context of the exchange of a training step, once all parts are computed. Collective."""
        with nullcontext() if self._shares is None else self._shares.exchanging(batch):
            if batch.verified is not None and self._verified is not None:
                self._verified.compare(batch)
            yield

    def evaluation_step(self, batch: Batch) -> None:
        """Adds a batch's loss and metrics to the evaluation accumulators."""
        sums = self._ordered.evaluation_part_sums(self.fractions(batch))
        self._ordered.add_part_sums("evaluation", self._total(batch, self._trees(batch, sums)))

    def fractions(self, batch: Batch) -> Batch:
        """The batch with each slice's fraction of the global batch as its weight.

        The verified part becomes the last slice of each replica.
        """
        further = () if batch.verified is None else (batch.verified,)
        slices = tuple(
            tuple(_weighted(each, each.count / batch.size) for each in (*micro_batches, *further))
            for micro_batches in batch.slices
        )
        return replace(batch, slices=slices, even=False, verified=None)

    def _trees(self, batch: Batch, part_sums: Iterable[Row]) -> list[SumTree]:
        """Sums over the parts of each local replica. Local."""
        assert batch.part_counts is not None
        replicas = self._group.local_replicas
        trees = [SumTree(self._ordered.accumulate) for _ in replicas]
        for index, sums in enumerate(part_sums):
            for tree, replica, addends in zip(trees, replicas, sums, strict=True):
                first, end = part_bounds(batch.part_counts, replica)
                if first + index < end:
                    tree.add(first + index, 1, addends)
        return trees

    def _total(self, batch: Batch, trees: Sequence[SumTree]) -> list[list[Tensor]]:
        """Sums over all parts, for each local replica."""
        rows = max(len(tree.subtrees) for tree in trees)
        values = [
            [tree.subtrees[min(row, len(tree.subtrees) - 1)][2] for tree in trees]
            for row in range(rows)
        ]
        clients = () if self._shares is None else self._shares.clients
        static = batch.part_counts, clients
        return self._group.compute(sum_over_replicas, *values, static=static)


def _weighted(micro_batch: Slice, weight: float) -> Slice:
    """The slice with a weight; itself if it has that weight, as with one replica: a copy takes longer."""
    return micro_batch if micro_batch.weight == weight else replace(micro_batch, weight=weight)


def require_equal_layers(group: ReplicaGroup, spec: TrainingSpec) -> None:
    """Refuses models whose results depend on the number of replicas.

    Raises:
        UnsupportedError: The model has state or random numbers for each replica.
    """
    varying = {Trait.GLOBAL_STATISTICS: _SUMS}
    if spec.random_layers == "per-replica":
        varying[Trait.RANDOM] = _DRAWS
    for trait, reason in varying.items():
        layers = [each.layer for each in group.traits() if each.trait == trait]
        if layers:
            raise UnsupportedError(
                f"reproducible: {first_of(layers, _MAX_LAYERS)} {reason}, or leave reproducible out."
            )
    if carried := list(group.describe_state(("carry",))):
        raise UnsupportedError(
            f"reproducible: {first_of(carried, _MAX_LAYERS)}: each replica carries it from one call to"
            " the next. Leave reproducible out, or use layers that are not stateful."
        )
