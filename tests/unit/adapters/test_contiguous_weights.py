"""Weights on torch with other strides than those of new tensors, which `reproducible` lays out row by row."""

from __future__ import annotations

import pytest
import torch

from isotrain.adapters.torch.base.tensors import make_contiguous
from isotrain.core.errors import SpecError


def test_weights_are_laid_out_row_by_row() -> None:
    """A column has the strides of a new tensor afterwards too, though torch calls others contiguous."""
    fused = torch.arange(24.0).reshape(4, 6)
    weights = {
        "transposed": torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).t()),
        "column": torch.nn.Parameter(torch.arange(4.0).reshape(1, 4).t()),
        "image": torch.nn.Parameter(torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        "left": torch.nn.Parameter(fused[:, :3]),
        "right": torch.nn.Parameter(fused[:, 3:]),
        "as it is": torch.nn.Parameter(torch.rand(3)),
    }
    before = {name: (id(each), each.detach().clone()) for name, each in weights.items()}
    address = weights["as it is"].data_ptr()
    make_contiguous(weights, [*weights.values(), torch.zeros(2)])
    for name, weight in weights.items():
        assert weight.stride() == torch.empty(weight.shape).stride(), name
        assert id(weight) == before[name][0]
        assert torch.equal(weight, before[name][1])
    assert weights["as it is"].data_ptr() == address


@pytest.mark.parametrize("is_weight", [True, False])
def test_weights_that_share_memory_are_refused(is_weight: bool) -> None:
    """Where they lack the strides of a new tensor: a copy of one would no longer change with the other."""
    first = torch.nn.Parameter(torch.rand(4, 3))
    tied = torch.nn.Parameter(first.detach().t())
    weights = {"tied": tied} | ({"first": first} if is_weight else {})
    with pytest.raises(
        SpecError, match=r"reproducible: .*'tied' with strides \(1, 3\), which shares"
    ):
        make_contiguous(weights, [first])
    assert tied.data_ptr() == first.data_ptr()
