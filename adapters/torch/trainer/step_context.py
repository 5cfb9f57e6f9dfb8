"""The step context of a torch replica: differentiable collectives, values and gradients."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from isotrain.adapters.common.sample_draws import DrawKeys
from isotrain.adapters.common.step_context import CommonStepContext
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.pytree import row_count, signature
from isotrain.adapters.torch.base.sample_draws import TorchPassDraws
from isotrain.adapters.torch.base.seeded_draws import RefusingSeededDraws
from isotrain.plugin import Batch, Phase, Slice, TrainingSpec

_FIRST_EVALUATION = -(1 << 31)
"""Word of the first step of an evaluation: no step of the training has it."""

_MOST_AXES = 8
"""Number of axes that the check of shapes compares."""

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sum of a tensor over all replicas, not differentiable."""


class _Sum(torch.autograd.Function):
    """Sum over all replicas; the gradient is the sum of the replicas' gradients, at any order."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, all_reduce: AllReduce) -> torch.Tensor:
        """Sums a tensor of any shape. Collective."""
        ctx.all_reduce = all_reduce
        return all_reduce(x.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sums the gradients by the result, of its shape. Collective."""
        return _Sum.apply(gradient, ctx.all_reduce), None


class TorchStepContext(CommonStepContext):
    """Step context of one torch replica."""

    replicas = 1
    index = 0

    def __init__(self, spec: TrainingSpec, frozen: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(spec, frozen)
        self._dtype = torch.float64 if spec.precision == "float64" else torch.float32
        self._weight = 1.0
        self._batch_size = 0
        self._gathers = self._sums = 0
        self._rows_per_sample: dict[int, int] = {}
        self._is_even = True
        self._varies = False
        self._checked_sums: set[Hashable] = set()
        self._phase: Phase = "train"
        self._passes: Counter[Hashable] = Counter()
        self._step_word = 0
        self._local_samples = 0, 0
        self._position = torch.zeros(4, dtype=torch.int32)

    def connect(
        self, index: int, replicas: int, all_reduce: AllReduce, device: torch.device
    ) -> None:
        """Connects this replica to the others.

        Args:
            index: Index of this replica.
            replicas: Number of replicas in the run.
            all_reduce: Sum over all replicas, in a process group that no gradients use:
                DistributedDataParallel starts its all-reduces while the backward pass sums here.
            device: Device of this replica.
        """
        self.index, self.replicas = index, replicas
        self._all_reduce = all_reduce
        self._device = device
        self._position = self._position.to(device)

    def set_batch(self, batch: Batch, phase: Phase = "train") -> None:
        """Sets the batch that the objective computes next, and the values of its step."""
        self.values = {
            name: torch.tensor(value, dtype=self._dtype, device=self._device)
            for name, value in batch.values.items()
        }
        self._batch_size, self._is_even = batch.size, batch.even
        self._varies = batch.varying_widths
        self._phase = phase
        self._step_word = batch.step + (_FIRST_EVALUATION if phase == "evaluation" else 0)
        if self.draw_keys is not None:
            local = [each for each in batch.slices[0] if each.count]
            self._local_samples = local[0].first if local else 0, sum(each.count for each in local)

    def set_slice(self, micro_batch: Slice) -> None:
        """Sets the slice that the objective computes next."""
        self._weight = micro_batch.weight if micro_batch.count else 0.0
        self._gathers = self._sums = 0
        if self.draw_keys is not None:
            self._position.copy_(
                torch.tensor([self._step_word, micro_batch.first, *self._local_samples])
            )

    def rows_of(self, inputs: Any) -> int:
        return row_count(inputs)

    def pass_draws(self, keys: DrawKeys, inputs: Any) -> TorchPassDraws:
        return TorchPassDraws(keys, self._position, self.rows_of(inputs), self._phase == "train")

    @contextlib.contextmanager
    def refusing_other_draws(self, inputs: Any) -> Iterator[None]:
        if private_api.is_tracing():  # Keras has computed it before
            yield
            return
        form = self._phase, signature(inputs)
        self._passes[form] += 1
        is_checked = self._passes[form].bit_count() == 1  # 1, 2, 4, 8, ...
        with RefusingSeededDraws() if is_checked else contextlib.nullcontext():
            yield

    def all_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.require_collective("all_gather")
        if self.replicas == 1:
            return x, 0
        smaller, remainder = divmod(self._batch_size, self.replicas)
        samples = [smaller + (i < remainder) for i in range(self.replicas)]
        rows, gather = x if self._weight else x[:0], self._gathers
        self._gathers += 1
        factor = 0 if self._varies else self._rows_per_sample.get(gather, 0)
        counts = [factor * each for each in samples]
        gathered = self._gather(rows, counts) if factor else None
        if gathered is None:
            shapes = self._shapes_of_all(rows)
            self.require_one_shape("all_gather", [shape[1:] for shape in shapes])
            counts = [shape[0] for shape in shapes]
            factor = counts[0] // max(samples[0], 1)
            is_regular = counts == [factor * each for each in samples]
            self._rows_per_sample[gather] = factor if is_regular else 0
            gathered = self._gather(rows, counts)
            assert gathered is not None
        return gathered, sum(counts[: self.index]) if self._weight else 0

    def _gather(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor | None:
        """Differentiable rows of all replicas in order. Collective.

        Args:
            rows: Rows of this replica, shape `[rows, ...]`.
            counts: Number of rows that each replica is expected to have.

        Returns:
            Shape `[sum(counts), ...]`; None, on all replicas, where one has another number of rows.
        """
        shape, starts = rows.shape[1:], [0, *itertools.accumulate(counts)]
        before, end, total = (
            math.prod(shape) * each for each in (*starts[self.index : self.index + 2], starts[-1])
        )
        is_expected = len(rows) == counts[self.index]
        local = rows.flatten() if is_expected else rows.new_zeros(end - before)
        padded = functional.pad(local, (before, total - end + self.replicas))
        if not is_expected:
            padded[total + self.index] = 1
        elements, unexpected = self._sum(padded).split([total, self.replicas])
        return None if unexpected.any() else elements.view(starts[-1], *shape)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.require_collective("sum")
        if self.replicas == 1:
            return x
        self._require_one_shape("sum", x)
        return self._sum(self._of_samples(x))

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        self.require_collective("mean")
        if self.replicas == 1:
            return x
        self._require_one_shape("mean", x)
        return self._sum(self._of_samples(x) * (self._weight / self.replicas))

    def _require_one_shape(self, method: str, x: torch.Tensor) -> None:
        """Compares the shapes that replicas give a call of the objective. Collective, once.

        Each call of a pass is checked in the first even and the first uneven batch of a phase, which all
        replicas know.

        Raises:
            SpecError: They differ.
        """
        call = self._phase, self._is_even, self._sums
        self._sums += 1
        if call in self._checked_sums:
            return
        self.require_one_shape(method, self._shapes_of_all(x))
        self._checked_sums.add(call)

    def _shapes_of_all(self, x: torch.Tensor) -> list[list[int]]:
        """The shapes, up to 8 axes, of the tensors of all replicas. Collective."""
        sizes = torch.zeros(self.replicas, 1 + _MOST_AXES, dtype=torch.int64, device=self._device)
        axes = [x.dim(), *x.shape[:_MOST_AXES]]
        sizes[self.index, : len(axes)] = torch.tensor(axes, device=self._device)
        return [row[1 : 1 + row[0]] for row in self._all_reduce(sizes).tolist()]

    def _of_samples(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor, or zeros of its shape where this replica has no samples; differentiable."""
        return x if self._weight else torch.where(torch.zeros_like(x, dtype=torch.bool), x, 0)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """Differentiable sum over all replicas, any shape. Collective."""
        if x.dtype == torch.bool:
            return self._all_reduce(x.to(torch.int32)).to(torch.bool)
        return _Sum.apply(x, self._all_reduce)

    def gradient(self, f: Callable[[Any], torch.Tensor], x: Any) -> Any:
        is_one = isinstance(x, torch.Tensor)
        creates_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [
                each if each.requires_grad else each.detach().requires_grad_()
                for each in ([x] if is_one else x)
            ]
            result = f(inputs[0] if is_one else type(x)(inputs)).sum()
            gradients = (
                torch.autograd.grad(
                    result, inputs, create_graph=creates_graph, materialize_grads=True
                )
                if result.requires_grad
                else [torch.zeros_like(each) for each in inputs]
            )
        return gradients[0] if is_one else type(x)(gradients)
