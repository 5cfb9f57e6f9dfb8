"""Weights of a step's micro-batches in the mean loss of the global batch, while a `tf.function` is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

Total = Callable[[tf.Tensor], tf.Tensor]
"""Sums a tensor over all replicas."""


class SliceWeights:
    """Weights of one replica's micro-batches in one step: by their samples, or by their loss denominators.

    Losses with denominators of their own (masks, class weights) cost one small all-reduce, others cost none.
    """

    def __init__(
        self,
        weights: tf.Tensor | None,
        loss_denominators: Callable[[], Sequence[tf.Tensor]],
        total: Total,
        local: bool = False,
    ) -> None:
        """Sets the weights by samples.

        Args:
            weights: Weight of each micro-batch, shape `[micro_batches]`; None for a single one of weight 1.
            loss_denominators: Returns the loss denominators of each micro-batch, shape `[losses]`; called
                where there are several.
            total: Sums a tensor over all replicas.
            local: Whether gradients are those of this replica's own mean.
        """
        self._weights = weights
        self._loss_denominators = loss_denominators
        self._total = total
        self._local = local
        self._factors: tf.Tensor | None = None

    def of(self, index: int, loss: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Weights the loss of a micro-batch.

        Args:
            index: Index of the micro-batch.
            loss: Loss of the micro-batch: a scalar, or means and denominators, shape `[2, 1 + losses]`.

        Returns:
            The scalar to differentiate; and the micro-batch's part of the mean loss, a scalar.
        """
        if loss.shape.rank:
            return self._of_rows(index, loss)
        if self._weights is None:
            return loss, loss
        weighted_loss = loss * tf.cast(self._weights[index], loss.dtype)
        if not self._local:
            return weighted_loss, weighted_loss
        local_weight = tf.math.divide_no_nan(self._weights[index], tf.reduce_sum(self._weights))
        return loss * tf.cast(local_weight, loss.dtype), weighted_loss

    def _of_rows(self, index: int, loss: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Loss to differentiate, and part of the mean loss, scalars, from rows of means and denominators."""
        means, denominators = loss[0], tf.stop_gradient(loss[1])
        if self._factors is None:
            self._factors = self._all_factors(denominators[1:])
        factors = self._factors
        weighted_loss = tf.reduce_sum(means * tf.cast(factors[index], means.dtype))
        if not self._local:
            return weighted_loss, weighted_loss
        local_factors = tf.math.divide_no_nan(factors[index], tf.reduce_sum(factors, axis=0))
        return tf.reduce_sum(means * tf.cast(local_factors, means.dtype)), weighted_loss

    def _all_factors(self, denominators: tf.Tensor) -> tf.Tensor:
        """Factor of each mean of each micro-batch: float64, shape `[micro_batches, 1 + losses]`.

        Args:
            denominators: Loss denominators of a single micro-batch, shape `[losses]`.
        """
        weights = tf.ones(1, tf.float64) if self._weights is None else self._weights
        column = weights[:, tf.newaxis]
        has_several = weights.shape[0] > 1
        stacked = tf.stack(list(self._loss_denominators()) if has_several else [denominators])
        counting = tf.cast(stacked, tf.float64) * tf.cast(column > 0, tf.float64)
        total = self._total(tf.reduce_sum(tf.concat([counting, column], 1), axis=0))
        return tf.concat([column, counting * tf.math.divide_no_nan(total[-1], total[:-1])], 1)
