"""What groups of other placements than `replicated` can do besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.core.contracts.reduction import Reduction
from isotrain.core.contracts.replica import Tensor
from isotrain.core.data.batch import Batch
from isotrain.core.errors import UnsupportedError
from isotrain.core.stages.actions import Action
from isotrain.core.stages.executor import ExecutedAction
from isotrain.core.stages.profile import ModelProfile


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
        same on all replicas; `gather_stages` and `unshard_weights` get the others again. Means of replicas and
        translated state are written whole.
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

    def parameter_server_step(self, batch: Batch, learning_rate: float, staleness: int | None) -> Tensor:
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
        """What a parameter-server run measured so far, as JSON values: staleness, slices, lost workers. Local."""
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
