"""Sums in the order of NCCL's algorithms, and numbers of TF32."""

from __future__ import annotations

import pytest
import torch
from helpers import gpu_arithmetic
from helpers.gpu_arithmetic import GPUKernels, Sum, ring_sum, to_tf32, tree_sum

SUMS = [ring_sum, tree_sum]


def terms(ranks: int, dtype: torch.dtype, size: int = 101) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("sum_of", SUMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_term_is_summed_once(sum_of: Sum, dtype: torch.dtype, ranks: int) -> None:
    given = terms(ranks, dtype)
    exact = torch.stack([term.double() for term in given]).sum(0)
    sizes = torch.stack([term.double().abs() for term in given]).sum(0)
    bound = (ranks - 1) * torch.finfo(dtype).eps / 2 * sizes
    total = sum_of(given)
    assert total.dtype == dtype
    assert ((total.double() - exact).abs() <= 1.01 * bound).all()


@pytest.mark.parametrize("sum_of", SUMS)
def test_the_order_is_another_than_that_of_the_ranks(sum_of: Sum) -> None:
    given = terms(5, torch.float32)
    in_order = given[0] + given[1] + given[2] + given[3] + given[4]
    assert not torch.equal(sum_of(given), in_order)


def test_a_tree_is_that_of_nccl() -> None:
    """Of eight ranks: 0 has the child 4, which has 2 and 6, which have the odd ones."""
    tensors = [torch.tensor([value, value]) for value in (1e8, 1, 1, 1, -1e8, 1, 1, 1)]
    first, second = tree_sum(tensors).tolist()
    assert first == 0, "-1e8 is added to sums of 3 before 1e8 is"
    assert gpu_arithmetic.tree_sum(tensors[::-1]).tolist() == [second, first], "ranks are mirrored"


def test_tf32_has_ten_bits() -> None:
    values = torch.tensor([1 + 2.0**-10, 1 + 2.0**-11, 1 + 2.0**-12, -1 - 2.0**-11, 3e38])
    expected = [1 + 2.0**-10, 1 + 2.0**-10, 1.0, -1 - 2.0**-10]
    assert to_tf32(values)[:4].tolist() == expected


def test_rows_that_are_added_to_one_come_in_another_order() -> None:
    """Gradients of an embedding, and `index_add`; the sums are those of the rows, but for rounding."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3, 5, generator=generator, requires_grad=True)
    ids = torch.randint(3, (40, 7), generator=generator)
    factors = torch.randn(40, 7, 5, generator=generator)
    rows = torch.randn(4, 280, generator=generator)

    def sums() -> list[torch.Tensor]:
        found = torch.nn.functional.embedding(ids, table)
        (gradient,) = torch.autograd.grad((found * factors).sum(), table)
        return [gradient, torch.zeros(4, 3).index_add(1, ids.reshape(-1), rows)]

    plain = sums()
    with GPUKernels(0) as kernels:
        shuffled = sums()
    assert kernels.scattered == 2
    for one, other in zip(plain, shuffled, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
