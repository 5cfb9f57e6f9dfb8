"""Small tensors in the context where large ones have no values, against the same outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.without_values import (
    MissingValueError,
    WithoutValues,
    is_missing_value,
    lacks_values,
)


def large() -> torch.Tensor:
    return torch.ones(1024, 1024)


def added() -> torch.Tensor:
    small = torch.zeros(2)
    small += large().sum()
    return small


def copied() -> torch.Tensor:
    return torch.zeros(2).copy_(large().mean())


def set_in_part() -> torch.Tensor:
    small = torch.zeros(2)
    small[1] = large().sum()
    return small[:1]


def given_as_out() -> torch.Tensor:
    small = torch.zeros(2)
    torch.sum(large()[:, :2], 0, out=small)
    return small


def added_to_several() -> torch.Tensor:
    small = [torch.zeros(2), torch.zeros(3)]
    private_api.foreach_add_(small, [large()[0, :2], large()[0, :3]])
    return small[1]


def copied_once_more() -> torch.Tensor:
    return torch.zeros(2).add_(added() * 2)


WRITERS = [added, copied, set_in_part, given_as_out, added_to_several, copied_once_more]
READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": lambda tensor: float(tensor[0]),
    "bool": lambda tensor: bool((tensor > 0).all()),
    "numpy": lambda tensor: tensor.numpy(),
    "asarray": np.asarray,
    "tolist": lambda tensor: tensor.tolist(),
}


@pytest.mark.parametrize("written", WRITERS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_written_without_values_cannot_be_read(
    written: Callable[[], torch.Tensor], reader: str
) -> None:
    READERS[reader](written())
    with WithoutValues():
        tensor = written()
        assert lacks_values(tensor)
        with pytest.raises(RuntimeError, match="_local_scalar_dense"):
            READERS[reader](tensor)


def test_small_tensors_keep_what_has_values() -> None:
    with WithoutValues():
        weight, other = torch.nn.Parameter(torch.ones(1024)), torch.zeros(3)
        (large() @ weight).sum().backward()
        torch.optim.SGD([weight], lr=0.1).step()
        assert lacks_values(weight)
        other += 1
        assert not lacks_values(other)
        assert [reader(other) is not None for reader in READERS.values()] == [True] * len(READERS)
        assert float(torch.zeros(2).copy_(other[:2]).sum()) == 2
    assert not lacks_values(weight)


def test_a_small_tensor_is_not_given_the_memory_of_one_without_values() -> None:
    with WithoutValues():
        tensor = torch.zeros(3).set_(torch.ones(3))
        assert float(tensor.sum()) == 3
        with pytest.raises(MissingValueError, match="the memory of another") as raised:
            tensor.set_(large())
    assert is_missing_value(raised.value)


@pytest.mark.parametrize(
    "use",
    [
        torch.Tensor.data_ptr,
        lambda tensor: tensor.apply_(abs),
        lambda tensor: tensor.map_(tensor, max),
    ],
)
def test_memory_that_is_not_there_is_not_used(use: Callable[[torch.Tensor], Any]) -> None:
    """Addresses of all would be equal, and programs that read there would die."""
    use(torch.ones(3))
    with WithoutValues():
        use(torch.ones(3))
        with pytest.raises(MissingValueError, match="takes memory"):
            use(large())


def test_wrong_shapes_are_no_missing_values() -> None:
    images, kernel = torch.ones(8, 3, 200, 200), torch.ones(256, 250, 3, 3)
    with WithoutValues():
        with pytest.raises(RuntimeError, match="_local_scalar_dense") as raised:
            large().sum().item()
        assert is_missing_value(raised.value)
        for convolve in (torch.nn.functional.conv2d, torch.nn.functional.conv_transpose2d):
            with pytest.raises(RuntimeError, match="weight of size") as raised:
                convolve(images + torch.ones(images.shape), kernel)
            assert not is_missing_value(raised.value)
