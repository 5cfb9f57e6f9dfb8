"""Operations of a captured graph are called by torch's own functions, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.graph.codegen import FUNCTIONS

aten = torch.ops.aten


def of(*shape: int) -> torch.Tensor:
    """Numbers from 0.5 on."""
    return torch.arange(float(torch.tensor(shape).prod())).reshape(shape) / 4 + 0.5


PAIR = (of(2, 3), of(3))
IMAGES, VOLUMES = of(2, 3, 4, 4), of(1, 1, 2, 2, 2)
NAMED: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
    aten.add.Tensor: (PAIR, {"alpha": 2}),
    aten.binary_cross_entropy.default: ((of(2) / 2, of(2) / 4), {}),
    aten.contiguous.default: ((IMAGES,), {"memory_format": torch.channels_last}),
    aten.cross_entropy_loss.default: ((of(3, 2), torch.tensor([1, 0, 1])), {}),
    aten.expand.default: ((of(3), [2, 3]), {"implicit": False}),
    aten.mean.dim: ((of(2, 3), [0], True), {"dtype": torch.float64}),
    aten.sum.dim_IntList: ((of(2, 3), [0, 1]), {"dtype": torch.float64}),
    aten.sub.Tensor: (PAIR, {"alpha": 2}),
}
"""Those with arguments by name, or with a default that functions of torch do not share."""
GIVEN: dict[Any, tuple[Any, ...]] = {
    aten.addmm.default: (of(2), of(4, 3), of(3, 2)),
    aten.avg_pool2d.default: (IMAGES, [2, 2], [1, 1], [1, 0], False, False),
    aten.batch_norm.default: (IMAGES, *(of(3) for _ in range(4)), True, 0.25, 0.5, False),
    aten.binary_cross_entropy.default: (of(2) / 2, of(2) / 4, of(2), 2),
    aten.bmm.default: (of(2, 4, 3), of(2, 3, 2)),
    aten.cat.default: ((of(2, 1), of(2, 3)), -1),
    aten.clamp.default: (of(8), 1.0, 2.0),
    aten.constant_pad_nd.default: (of(2, 3), [1, 0, 0, 2], 0.5),
    aten.contiguous.default: (of(3, 2).t(),),
    aten.conv1d.default: (of(2, 3, 5), of(4, 3, 2), of(4), [2], [1], [1], 1),
    aten.conv2d.default: (IMAGES, of(6, 1, 2, 2), None, [1, 2], [1, 0], [2, 1], 3),
    aten.conv3d.default: (VOLUMES, VOLUMES, of(1), [1] * 3, [1] * 3),
    aten.cross_entropy_loss.default: (of(3, 2), torch.tensor([1, 0, 1]), of(2), 2, 0, 0.25),
    aten.embedding.default: (of(4, 3), torch.tensor([2, 0]), 1, False, False),
    aten.expand.default: (of(3), [2, 3]),
    aten.gelu.default: (of(3),),
    aten.layer_norm.default: (of(2, 3), [3], of(3), of(3), 0.5, False),
    aten.max_pool2d.default: (IMAGES, [2, 2], [1, 1], [1, 0], [1, 2], True),
    aten.matmul.default: (of(2, 4, 3), of(3, 2)),
    aten.mean.default: (of(3),),
    aten.mean.dim: (of(2, 3), [1], True),
    aten.mm.default: (of(4, 3), of(3, 2)),
    aten.permute.default: (of(2, 3, 4), [2, 0, 1]),
    aten.reshape.default: (of(2, 3), [-1, 2]),
    aten.scaled_dot_product_attention.default: (
        *(of(1, 2, 3, 4) for _ in range(3)),
        of(3, 3),
        0.0,
        False,
    ),
    aten.squeeze.dim: (of(2, 1, 3), 1),
    aten.sum.default: (of(2, 3),),
    aten.sum.dim_IntList: (of(2, 3), [1], True),
    aten.to.dtype: (of(3), torch.float64, False, True),
    aten.transpose.int: (of(2, 3, 4), 0, 2),
    aten.unsqueeze.default: (of(2, 3), 1),
    aten.view.default: (of(2, 3), [3, 2]),
    aten.where.self: (torch.tensor([True, False, True]), of(3), of(2, 3)),
}
"""Those that do not take one tensor, or two of which one is spread over the other."""


def arguments(operation: Any) -> tuple[Any, ...]:
    """Arguments that the operation takes by position."""
    takes_one = len(private_api.schema_of(operation).arguments) == 1
    return GIVEN.get(operation, (of(2, 3),) if takes_one else PAIR)


CASES = [
    *((operation, arguments(operation), {}) for operation in FUNCTIONS),
    *((operation, *given) for operation, given in NAMED.items()),
]


def copied(args: tuple[Any, ...]) -> list[Any]:
    """Copies of the arguments: some are changed in place."""
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in args]


@pytest.mark.parametrize(("operation", "args", "named"), CASES, ids=[str(c[0]) for c in CASES])
def test_a_direct_call_equals_its_operation(
    operation: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Values, dtype and memory layout agree, with arguments in this order."""
    expected = operation(*copied(args), **named)
    found = FUNCTIONS[operation](*copied(args), **named)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
