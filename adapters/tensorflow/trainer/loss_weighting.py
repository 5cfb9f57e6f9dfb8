"""What the slices of a step add to the mean loss of the global batch, while a `tf.function` is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

Total = Callable[[tf.Tensor], tf.Tensor]
"""Sums a tensor over all replicas."""


class SliceWeights:
    """The slices of one replica in one step, of which each counts by its samples, or by what counts in it.

    Losses that do not count all targets alike cost one exchange of a few numbers, others cost none.
    """

    def __init__(
        self,
        weights: tf.Tensor | None,
        count: Callable[[], Sequence[tf.Tensor]],
        total: Total,
        local: bool = False,
    ) -> None:
        """Knows nothing of the loss yet.

        Args:
            weights: Of the slices, shape `[slices]`; None where there is one, of weight 1.
            count: Gives what the losses that do not count all targets alike count by in each slice, where
                there are several.
            total: Sums over all replicas.
            local: Whether gradients are to be those of this replica's own mean.
        """
        self._weights = weights
        self._count = count
        self._total = total
        self._local = local
        self._factors: tf.Tensor | None = None

    def of(self, index: int, loss: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """A slice's share, as a loss computer gives its loss in rows or as a scalar.

        Returns:
            What to take gradients of; and the share of the mean loss.
        """
        if loss.shape.rank:
            return self._of_rows(index, loss)
        if self._weights is None:
            return loss, loss
        share = loss * tf.cast(self._weights[index], loss.dtype)
        if not self._local:
            return share, share
        own = tf.math.divide_no_nan(self._weights[index], tf.reduce_sum(self._weights))
        return loss * tf.cast(own, loss.dtype), share

    def _of_rows(self, index: int, loss: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        means, counted = loss[0], tf.stop_gradient(loss[1])
        if self._factors is None:
            self._factors = self._all_factors(counted[1:])
        factors = self._factors
        share = tf.reduce_sum(means * tf.cast(factors[index], means.dtype))
        if not self._local:
            return share, share
        own = tf.math.divide_no_nan(factors[index], tf.reduce_sum(factors, axis=0))
        return tf.reduce_sum(means * tf.cast(own, means.dtype)), share

    def _all_factors(self, counted: tf.Tensor) -> tf.Tensor:
        """By what each mean of each slice is multiplied: float64, shape `[slices, 1 + losses]`.

        Args:
            counted: What the losses of the only slice count by.
        """
        weights = tf.ones(1, tf.float64) if self._weights is None else self._weights
        column = weights[:, tf.newaxis]
        several = weights.shape[0] > 1
        each = tf.stack(list(self._count()) if several else [counted])
        own = tf.cast(each, tf.float64) * tf.cast(column > 0, tf.float64)
        total = self._total(tf.reduce_sum(tf.concat([own, column], 1), axis=0))
        return tf.concat([column, own * tf.math.divide_no_nan(total[-1], total[:-1])], 1)
