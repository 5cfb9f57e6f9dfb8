"""Passes over captured graphs: which operations they remove, and which they must leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from isotrain.adapters.common.sample_draws import DrawKeys
from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.sample_draws import TorchPassDraws
from isotrain.adapters.torch.graph.codegen import compile_direct_calls, shortened
from isotrain.adapters.torch.graph.passes import exact as exact_passes
from isotrain.adapters.torch.graph.passes import fast as fast_passes

SCORES = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 1.0], [3.0, 0.0, 1.0], [1.0, 1.0, 2.0]])
CLASSES = torch.tensor([2, 0, -100, 1])
"""One is of no class: torch ignores it."""


def simplified(
    function: Callable[..., torch.Tensor], *given: torch.Tensor
) -> tuple[GraphModule, list[torch.Tensor]]:
    """A function as it is recorded, and what its graph is given first."""
    module = private_api.traced(function, *given)
    return module, exact_passes.simplify(module, 0, ())


def operations(module: GraphModule | Graph) -> list[str]:
    graph = module if isinstance(module, Graph) else module.graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return [str(node.target).removeprefix("aten.") for node in nodes]


def mean_entropy(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy as Keras computes it: float classes, and a quotient that may be by 0."""
    values = functional.cross_entropy(scores, classes.float().long(), reduction="none")
    count = torch.as_tensor([len(values)]).prod().float()
    safe = torch.where(count == 0, torch.ones_like(count), count)
    return torch.where(count == 0, 0, torch.divide(values.sum(), safe))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_a_mean_of_entropies_takes_two_operations(kind: torch.dtype) -> None:
    """Its gradients are those of Keras."""
    classes = CLASSES if kind.is_signed else CLASSES.abs() % 3
    given = SCORES.requires_grad_(), classes.to(kind)
    module, constants = simplified(mean_entropy, SCORES.detach(), given[1])
    assert "where" not in "".join(operations(module))
    faster = fast_passes.optimized(module)
    assert faster is not None
    casts = [] if kind == torch.int64 else ["to.dtype"]
    fused = [*casts, "cross_entropy_loss.default", "divide.Tensor"]
    assert operations(shortened(faster)) == fused
    shorter = compile_direct_calls(module)
    losses = [each(*constants, *given) for each in (module, shorter, faster)]
    assert torch.equal(losses[0], mean_entropy(*given))
    gradients = [torch.autograd.grad(loss, SCORES)[0] for loss in losses]
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(losses[0], losses[2])
    torch.testing.assert_close(gradients[0], gradients[2])


def test_draws_by_sample_are_computed_together() -> None:
    """Except one that is common to all samples, and a large one."""
    position = torch.tensor([5, 2], dtype=torch.int32)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        draws = TorchPassDraws(DrawKeys(7), position, 4, True)
        for width, large in ((3, 1), (6, 1), (3, 1 << 14)):
            x = x * draws.bernoulli((4, width * large), 0.5, x.dtype)[:, :3]
        return x * draws.uniform((), x.dtype) + draws.normal_like(x)

    given = torch.randn(4, 3)
    module, constants = simplified(dropped, given)
    drawn = [each for each in operations(module) if "isotrain_random" in each]
    assert drawn == [
        "isotrain_random.integers_of_draws.default",
        "isotrain_random.integers.default",
        "isotrain_random.integers.default",
        "isotrain_random.integers.default",
    ]
    for step in (5, 6):
        position[0] = step
        assert torch.equal(module(*constants, given), dropped(given))


def by_choice(dropped: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Chooses by what is known when it is recorded."""

    def chosen(given: torch.Tensor) -> torch.Tensor:
        other = dropped(given) if callable(dropped) else dropped
        return torch.where(torch.tensor(False), other, given * 2)

    return chosen


def spread(given: torch.Tensor) -> torch.Tensor:
    """The choice has a larger shape than what is chosen."""
    return torch.where(torch.tensor([[False]]), 0.0, given * 2)


def seen(given: torch.Tensor) -> torch.Tensor:
    """What is chosen is changed afterwards."""
    doubled = given * 2
    return torch.where(torch.tensor(False), 0.0, doubled) + doubled.add_(1)


def mixed(given: torch.Tensor) -> torch.Tensor:
    """Each element is chosen otherwise."""
    return torch.where(torch.tensor([True, False]), 0.0, given * 2)


LEFT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "is mixed": mixed,
    "has gradients": by_choice(torch.exp),
    "is spread": spread,
    "is seen": seen,
}


@pytest.mark.parametrize("name", LEFT)
def test_an_inequivalent_choice_is_not_replaced(name: str) -> None:
    """Users of its result and gradients would see another value."""
    given = torch.tensor([1.0, 2.0])
    module, constants = simplified(LEFT[name], given)
    assert "where" in "".join(operations(module))
    assert torch.equal(module(*constants, given), LEFT[name](given))


def test_labels_beyond_the_dtypes_integers_stay_rounded() -> None:
    """There are more classes than the dtype has whole numbers."""

    def roughly(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores, classes.half().long(), reduction="sum")

    given = SCORES.detach(), CLASSES
    module, constants = simplified(roughly, *given)
    assert operations(shortened(module)) == operations(module)
    assert torch.equal(compile_direct_calls(module)(*constants, *given), roughly(*given))


def test_integer_probabilities_are_no_labels() -> None:
    def marked(scores: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores, marks.float().double(), reduction="mean")

    given = SCORES.detach().double(), (SCORES.detach() > 0).long()
    module, constants = simplified(marked, *given)
    assert operations(shortened(module)) == operations(module)
    assert torch.equal(compile_direct_calls(module)(*constants, *given), marked(*given))


class ProductsOfKernels(TorchDispatchMode):
    """Records the shapes and strides that each matrix product gets.

    Attributes:
        operands: Operation, and shape and strides of each operand, in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Any] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if "mm" in str(operation):
            forms = [(tuple(each.shape), each.stride()) for each in args]
            self.operands.append((str(operation), forms))
        return operation(*args, **(kwargs or {}))


def turned(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """The values of a tensor of any shape, in memory in the order of these axes."""
    back = [list(axes).index(axis) for axis in range(x.dim())]
    return x.permute(*axes).contiguous().permute(*back)


EINSUMS: dict[str, tuple[str, Sequence[int], Sequence[int]]] = {
    "heads": ("abc,cde->abde", (2, 3, 5), (5, 2, 4)),
    "heads together": ("abcd,cde->abe", (2, 3, 4, 2), (4, 2, 5)),
    "a matrix": ("ab,bc->ac", (7, 300), (300, 9)),
}
"""Equation, and shapes of the factors."""


@pytest.mark.parametrize("order", [1, -1], ids=["contiguous", "turned"])
@pytest.mark.parametrize("name", EINSUMS)
def test_an_einsum_is_its_product_to_the_bit(name: str, order: int) -> None:
    """The kernels get the same operands in both passes, whatever the layout of factors and gradients."""
    equation, *shapes = EINSUMS[name]
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(*shape, generator=generator) for shape in shapes]
    given = [turned(each, range(each.dim())[::order]).requires_grad_() for each in given]

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, left, right)

    module, _ = simplified(product, *(each.detach() for each in given))
    assert operations(shortened(module)) == [
        *["reshape.default"] * 2,
        "bmm.default",
        "reshape.default",
    ]
    results: list[list[torch.Tensor]] = []
    recorded: list[Any] = []
    for function in (product, compile_direct_calls(module)):
        with ProductsOfKernels() as products:
            result = function(*given)
            weights = turned(torch.arange(result.numel()) / 7.0, [0]).reshape(result.shape)
            weights = turned(weights, range(result.dim())[::order])
            gradients = torch.autograd.grad(result, given, weights)
        results.append([result, *gradients])
        recorded.append(products.operands)
    assert recorded[0] == recorded[1]
    assert len(recorded[0]) == 3
    assert all(map(torch.equal, *results))
    assert [each.stride() for each in results[0]] == [each.stride() for each in results[1]]


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("abc,abd->abcd", ((2, 3, 4), (2, 3, 5))),
        ("abc,cd->abd", ((1, 3, 4), (4, 2))),
        ("abc,cd->adb", ((2, 3, 4), (4, 2))),
    ],
)
def test_another_einsum_stays(equation: str, shapes: Sequence[Sequence[int]]) -> None:
    """It is no matrix product, has an axis of size 1, or turns the product."""

    def product(*factors: torch.Tensor) -> torch.Tensor:
        return torch.einsum(equation, *factors)

    module, _ = simplified(product, *(torch.ones(*shape) for shape in shapes))
    assert operations(shortened(module)) == ["einsum.default"]


CONVOLVED: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool, tuple[Any, ...]]] = {
    "a point": ((2, 3, 4, 4), (1, 1, 3, 5), False, (1,)),
    "a point with a bias, strided": ((2, 3, 5, 4), (1, 1, 3, 5), True, ([2, 3],)),
    "several places": ((2, 3, 4, 4), (3, 2, 3, 40), True, ([1, 2], [1, 0], [1, 2])),
    "one axis": ((2, 3, 6), (3, 3, 40), False, (2, 1)),
    "three axes": ((1, 2, 3, 3, 3), (2, 2, 2, 2, 40), False, (1,)),
}
"""Shapes of images and of the kernel as Keras keeps it, whether it has a bias; strides, padding, dilation."""
LARGE: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "a point": ((2, 3, 32, 17), (1, 1, 3, 5)),
    "several places": ((2, 3, 4, 4), (3, 2, 3, 8)),
}
"""Of which a product would take longer."""


def convolution(
    rank: int, steps: tuple[Any, ...] = (), groups: int = 1
) -> Callable[..., torch.Tensor]:
    """Convolution as Keras computes it: channels last, with a copied kernel."""
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]

    def convolved(images: torch.Tensor, kernel: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        turned = kernel.permute(rank + 1, rank, *range(rank)).contiguous()
        second = images.permute(0, rank + 1, *range(1, rank + 1)).contiguous()
        found = convolve(second, turned, *(bias or [None]), *steps, groups=groups)
        return found.permute(0, *range(2, rank + 2), 1)

    return convolved


def numbers(*shape: int) -> torch.Tensor:
    """Small whole ones, so that sums are exact."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-8, 8, shape, generator=generator).double()


@pytest.mark.parametrize("name", CONVOLVED)
def test_small_images_are_convolved_by_a_product(name: str) -> None:
    """Its gradients are those of the convolution, and it copies no kernel."""
    shape, places, is_biased, steps = CONVOLVED[name]
    images = numbers(shape[0], *shape[2:], shape[1])
    given = [images, numbers(*places), *([numbers(places[-1])] if is_biased else [])]
    convolved = convolution(len(shape) - 2, steps)
    module, _ = simplified(convolved, *given)
    faster = fast_passes.optimized(module)
    assert faster is not None
    used = operations(faster)
    assert ("addmm.default" if is_biased else "mm.default") in used
    assert not {"contiguous.default", "conv1d.default", "conv2d.default"} & {*used}
    leaves = [each.requires_grad_() for each in given]
    expected, found = convolved(*given), faster(*given)
    assert torch.equal(found, expected)
    weights = numbers(*expected.shape)
    both = [torch.autograd.grad((each * weights).sum(), leaves) for each in (expected, found)]
    assert all(map(torch.equal, *both))


def padded_and_convolved(widths: Sequence[int]) -> Callable[..., torch.Tensor]:
    """Convolution of images that are padded by widths before and after each axis, from the last."""

    def convolved(images: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(functional.pad(images, widths), kernel)

    return convolved


@pytest.mark.parametrize(
    ("widths", "is_fused"), [((2, 2, 1, 1), True), ((1, 1), True), ((1, 0, 1, 0), False)]
)
def test_padding_is_fused_where_it_is_symmetric(widths: Sequence[int], is_fused: bool) -> None:
    given, function = (numbers(2, 3, 5, 6), numbers(4, 3, 3, 3)), padded_and_convolved(widths)
    module, _ = simplified(function, *given)
    faster = fast_passes.optimized(module)
    assert (faster is not None) == is_fused
    assert torch.equal((faster or module)(*given), function(*given))


def test_a_permutation_moves_before_a_padding() -> None:
    def permuted(images: torch.Tensor) -> torch.Tensor:
        return functional.pad(images, (1, 2, 0, 3)).permute(0, 2, 3, 1)

    images = numbers(2, 3, 4, 5)
    faster = fast_passes.optimized(simplified(permuted, images)[0])
    assert faster is not None
    assert operations(faster) == ["permute.default", "pad.default"]
    assert torch.equal(faster(images), permuted(images))


def layer(contracted: int) -> Callable[..., torch.Tensor]:
    """Product of matrices, or the einsum of Keras' `EinsumDense` over so many axes, and a bias."""
    if contracted == 1:
        return lambda left, right, bias: torch.matmul(left, right) + bias
    return lambda left, right, bias: torch.einsum("abcd,cde->abe", left, right) + bias


LAYERS = {
    "short": (layer(1), (4, 8, 16), (16, 24), (24,)),
    "wide": (layer(1), (64, 96), (96, 130), (130,)),
    "long": (layer(1), (32, 3000), (3000, 40), (40,)),
    "longer": (layer(1), (8, 9001), (9001, 3), (3,)),
    "heads": (layer(2), (4, 6, 2, 8), (2, 8, 16), (16,)),
    "empty": (layer(1), (0, 16), (16, 24), (24,)),
}
"""A layer, and the shapes of its inputs, kernel and bias."""


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_is_fused_where_that_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    """Kernels that round otherwise with a bias do so for most elements of other numbers, too."""
    function, *shapes = LAYERS[name]
    generator = torch.Generator().manual_seed(1)
    draws = [
        [torch.randn(*each, generator=generator).to(dtype).requires_grad_() for each in shapes]
        for _ in range(5)
    ]
    module, _ = simplified(function, *(each.detach() for each in draws[0]))
    with torch.no_grad():
        exact = fast_passes.optimized(module, exactly=True)
    faster = fast_passes.optimized(module)
    assert faster is not None
    assert operations(faster).count("addmm.default") == 1
    changed = sum(bits_changed(function, faster, given) for given in draws)
    assert (exact is not None) == (not changed and name != "empty")
    if exact is not None:
        assert operations(exact) == operations(faster)


UNCOMPARED = {
    "integers": [torch.ones(each, dtype=torch.int32) for each in ((4, 8), (8, 3), (3,))],
    "expanded": [torch.ones(1, 8).expand(4, 8), torch.ones(8, 3), torch.ones(3)],
    "large": [torch.ones(1), torch.ones(1024, 1024), torch.ones(1024)],
}
"""Inputs, kernel and bias of which random ones cannot be drawn, or would take long to multiply."""


@pytest.mark.parametrize("name", UNCOMPARED)
def test_a_bias_that_is_not_compared_is_not_fused(name: str) -> None:
    def biased(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.matmul(left if len(left) > 1 else left.repeat(512, 1024), right) + bias

    module, _ = simplified(biased, *UNCOMPARED[name])
    assert fast_passes.optimized(module, exactly=True) is None


def bits_changed(
    function: Callable[..., torch.Tensor], faster: GraphModule, given: Sequence[torch.Tensor]
) -> bool:
    """Whether results or gradients differ."""
    results = [each(*given) for each in (function, faster)]
    weights = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(2))
    gradients = [torch.autograd.grad(each, given, weights.to(each.dtype)) for each in results]
    return not all(map(torch.equal, (results[0], *gradients[0]), (results[1], *gradients[1])))


def normalized(inputs: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Batch normalisation as Keras computes it in training; mean and variance are the last two rows."""
    mean = inputs.mean([0], True)
    variance = inputs.square().mean([0], True) - mean.square()
    mean, variance = mean.squeeze([0]), variance.squeeze([0])
    root = (variance.reshape(1, 3) + 0.5).rsqrt_()
    centred = torch.subtract(inputs, mean.reshape(1, 3))
    result = centred.mul_(root * scale.reshape(1, 3)).add_(shift.reshape(1, 3))
    return torch.cat([result, mean.reshape(1, 3), variance.reshape(1, 3)])


@pytest.mark.parametrize("samples", [1, 4])
def test_batch_normalization_is_fused_with_its_statistics(samples: int) -> None:
    """Of one sample it is not: torch refuses that."""
    given = numbers(samples, 3), numbers(3), numbers(3)
    module, _ = simplified(normalized, *given)
    faster = fast_passes.optimized(module)
    assert ("batch_norm.default" in operations(faster or module)) == (samples > 1)
    torch.testing.assert_close((faster or module)(*given), normalized(*given))


@pytest.mark.parametrize("name", LARGE)
def test_large_images_are_convolved(name: str) -> None:
    shape, places = LARGE[name]
    given = numbers(shape[0], *shape[2:], shape[1]), numbers(*places)
    faster = fast_passes.optimized(simplified(convolution(2), *given)[0])
    assert faster is None or "conv2d.default" in operations(faster)


def test_groups_are_convolved() -> None:
    given = numbers(2, 4, 4, 4), numbers(1, 1, 2, 6)
    faster = fast_passes.optimized(simplified(convolution(2, groups=2), *given)[0])
    assert faster is None or "conv2d.default" in operations(faster)
