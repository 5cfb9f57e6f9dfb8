"""Random numbers by sample: the generator, distributions, splits of a batch, and refusals."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import isotrain
from isotrain.adapters.common.sample_draws import (
    DrawKeys,
    active,
    repeatable,
    rotated_words,
    threefry_2x32,
)
from isotrain.adapters.torch.base.random_layers import draw_by_sample
from isotrain.adapters.torch.base.sample_draws import TorchPassDraws
from isotrain.adapters.torch.trainer.step_context import TorchStepContext
from isotrain.core.contracts.backend.sample_draws import draw_by
from isotrain.core.data.batch import Batch, Slice
from isotrain.core.errors import SpecError

KNOWN_ANSWERS = (
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
)
"""Key, counter and words of `threefry2x32` with 20 rounds in the file `kat_vectors` of Random123."""


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_generator_gives_the_published_words(key: Any, counter: Any, words: Any) -> None:
    arrays = [tuple(np.array([w], np.uint32) for w in each) for each in (key, counter)]
    results = threefry_2x32(*arrays, rotated_words)
    assert tuple(int(each[0]) for each in results) == words


def draws_of(rows: int, first: int = 0, step: int = 5, seed: int = 7) -> TorchPassDraws:
    position = torch.tensor([step, first], dtype=torch.int32)
    return TorchPassDraws(DrawKeys(seed), position, rows, is_training=True)


def test_torch_computes_the_words_of_the_generator() -> None:
    """The key is of seed and draw, the step is added to it, and the counter is sample and half the index."""
    keys = DrawKeys((3 << 32) + 7)
    seed = tuple(np.array([word], np.uint32) for word in (7, 3))
    counter = tuple(np.array([word], np.uint32) for word in (0, 1))
    expected = threefry_2x32(seed, counter, rotated_words)  # type: ignore[arg-type]
    assert keys.of_draw(1) == tuple(int(each[0]) for each in expected)
    draws = TorchPassDraws(keys, torch.tensor([-2, 3], dtype=torch.int32), 2, True)
    draws.draws = 1
    key = np.uint32(keys.of_draw(1)[0]), np.uint32(keys.of_draw(1)[1]) + np.array([-2]).astype("u4")
    samples, blocks = np.meshgrid(
        np.arange(3, 5, dtype="u4"), np.arange(3, dtype="u4"), indexing="ij"
    )
    words = threefry_2x32(key, (samples, blocks), rotated_words)
    numbers = (np.stack(words, -1) >> 9).reshape(2, 6)
    assert draws.integers((2, 5)).tolist() == numbers[:, :5].tolist()


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_splits_draw_the_rows_of_the_batch(name: str) -> None:
    whole = getattr(draws_of(7), name)((7, 3, 3), "float64")
    parts = [
        getattr(draws_of(n, first), name)((n, 3, 3), "float64") for n, first in ((4, 0), (3, 4))
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_slices_of_a_step_get_their_rows_of_its_draws() -> None:
    """Small draws are computed at once for all samples of the replica: here for 3 to 8, of two steps."""
    for step in (5, 6):
        for rows, first in ((4, 3), (2, 7), (3, 8), (6, 3)):
            position = torch.tensor([step, first, 3, 6], dtype=torch.int32)
            one, whole = (
                TorchPassDraws(DrawKeys(7), position, rows, True),
                draws_of(rows, first, step),
            )
            for width in (5, 1 << 14):
                assert torch.equal(one.integers((rows, width)), whole.integers((rows, width)))


def test_a_slice_without_samples_draws_nothing() -> None:
    assert draws_of(0).integers((0, 3)).shape == (0, 3)
    assert draws_of(0).uniform((0, 2, 2), "float32").shape == (0, 2, 2)


def test_draws_differ() -> None:
    """Numbers of other seeds, steps, samples, draws and updates are others."""
    first, keys = draws_of(2), DrawKeys(7)
    keys.update = "critic"
    numbers = [
        first.uniform((2, 9), "float64"),
        first.uniform((2, 9), "float64"),
        draws_of(2, seed=8).uniform((2, 9), "float64"),
        draws_of(2, step=6).uniform((2, 9), "float64"),
        draws_of(2, first=2).uniform((2, 9), "float64"),
        TorchPassDraws(keys, torch.tensor([5, 0]).int(), 2, True).uniform((2, 9), "float64"),
    ]
    assert len(torch.unique(torch.cat(numbers))) == 6 * 18


def test_distributions() -> None:
    """Moments of 200,000 numbers are within five standard errors."""
    draws = draws_of(200)
    shape, error = (200, 1000), 5 / np.sqrt(200_000)
    unit, normal = draws.uniform(shape, "float64"), draws.normal(shape, "float32")
    assert unit.min() > 0
    assert draws.uniform(shape, "float32").max() < 1
    assert abs(unit.mean() - 0.5) < error * 12**-0.5
    assert abs(normal.mean()) < error
    assert abs(normal.var() - 1) < error * 2**0.5
    assert abs((normal**4).mean() - 3) < error * 96**0.5
    assert abs((normal[:, 0::2] * normal[:, 1::2]).mean()) < error * 2**0.5
    assert abs(draws.bernoulli(shape, 0.2, "float64").mean() - 0.2) < error * 0.4


def test_dtypes_draw_the_same() -> None:
    wide, narrow = (draws_of(3).uniform((3, 99), each) for each in ("float64", "float32"))
    assert torch.equal(wide, narrow.double())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_uniform_numbers_of_narrow_dtypes_are_below_one(dtype: str) -> None:
    unit = draws_of(200).uniform((200, 1000), dtype)
    assert unit.min() > 0
    assert unit.max() == 1 - torch.finfo(unit.dtype).eps / 2


def test_repeated_function_draws_again_what_it_drew() -> None:
    draws = draws_of(2)
    with active(draws):
        draws.uniform((2,), "float64")
        function = repeatable(lambda: draws_in_pass().uniform((2,), "float64"))
        first, later = function(), draws.uniform((2,), "float64")
    assert torch.equal(function(), first)
    assert not torch.equal(first, later)


def draws_in_pass() -> Any:
    from isotrain.plugin import active_draws

    return active_draws.get()


def context(**fields: Any) -> TorchStepContext:
    required = {"model": dict, "data": dict, "loss": "mse", "optimizer": {"name": "sgd", "lr": 1}}
    sizes = {"global_batch_size": 8, "epochs": 1, "random_layers": "per-sample"}
    spec = isotrain.TrainingSpec(**required | sizes | fields)
    step = TorchStepContext(spec, {})
    step.connect(0, 1, lambda tensor: tensor, torch.device("cpu"))
    return step


def passed(
    step: TorchStepContext, compute: Callable[[Any], Any], x: torch.Tensor, first: int
) -> Any:
    """Result of a pass over the rows of an array in step 4."""
    micro_batch = Slice(x, None, len(x), 1.0, first)
    step.set_batch(Batch(0, 4, 4, len(x), False, True, ((micro_batch,),)))
    step.set_slice(micro_batch)
    return step.drawing(lambda inputs, targets: compute(inputs))(x, None)


@pytest.fixture(autouse=True)
def per_sample() -> Iterator[None]:
    yield
    draw_by("per-sample")


def test_dropout_of_torch() -> None:
    """Functions of torch drop by sample in a pass, and as ever outside of one."""
    draw_by_sample(nn.Dropout())
    x, step = torch.ones(6, 4, 3), context()

    def compute(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.dropout1d(x, 0.5), 0.25)

    whole = passed(step, compute, x, 0)
    assert torch.equal(whole[2:5], passed(step, compute, x[:3], 2))
    torch.testing.assert_close(whole.unique(), torch.tensor([0.0, 2 / 0.75]))
    channels = passed(step, lambda x: functional.dropout1d(x, 0.5), x, 0)
    assert (channels.amin(2) == channels.amax(2)).all()
    torch.manual_seed(0)
    expected = torch.dropout(x, 0.5, True)
    torch.manual_seed(0)
    assert torch.equal(functional.dropout(x, 0.5), expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.5}, {"scale": 0.0}, {"attn_mask": "bool"}],
)
def test_attention_that_drops_is_attention(options: dict[str, Any]) -> None:
    """With a tiny rate it is torch's attention."""
    draw_by_sample(nn.Dropout())
    random = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, 5, 4, generator=random).double() for _ in range(3))
    if "attn_mask" in options:
        options = {"attn_mask": torch.randn(5, 5, generator=random) > -1}
        options["attn_mask"][2] = False
    attention = functional.scaled_dot_product_attention
    expected = attention(query, key, value, **options)
    dropped = passed(
        context(), lambda x: attention(x, key, value, dropout_p=1e-7, **options), query, 0
    )
    torch.testing.assert_close(dropped, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "not by sample"),
        ({"random_layers": "per-replica", "reproducible": "bits"}, "by replica"),
    ],
)
@pytest.mark.parametrize(
    "draw",
    [
        lambda x, generator: torch.randn_like(x),
        lambda x, generator: torch.randn(x.shape, generator=generator),
        lambda x, generator: torch.empty_like(x).bernoulli_(0.5, generator=generator),
        lambda x, generator: torch.multinomial(x, 1, generator=generator),
        lambda x, generator: torch.randperm(len(x), generator=generator),
    ],
)
def test_other_draws_are_refused(fields: dict[str, Any], message: str, draw: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with pytest.raises(SpecError, match=message):
        passed(context(**fields), lambda x: draw(x, generator), torch.ones(2, 3), 0)


def test_draws_that_are_not_by_sample_are_allowed_where_keras_has_a_number_as_seed() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        with active(None):
            return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(1))

    x = torch.ones(2, 3)
    assert torch.equal(passed(context(), compute, x, 0), compute(x))


def test_attention_refuses_two_masks_as_torch_does() -> None:
    draw_by_sample(nn.Dropout())
    options: dict[str, Any] = {"attn_mask": torch.ones(3, 3) > 0, "is_causal": True}
    for rate in (0.0, 0.5):
        attention = functools.partial(
            functional.scaled_dot_product_attention, dropout_p=rate, **options
        )
        with pytest.raises(RuntimeError, match="is_causal"):
            passed(context(), lambda x, f=attention: f(x, x, x), torch.ones(2, 3, 4), 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_fully_masked_rows_of_attention_have_gradients(dtype: torch.dtype) -> None:
    """As in torch, such a row is zero, and adds nothing to the gradient."""
    draw_by_sample(nn.Dropout())
    x = torch.arange(24.0, dtype=torch.float64).view(2, 3, 4).sin().requires_grad_()
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    if dtype != torch.bool:
        mask = torch.zeros(3, 3, dtype=dtype).masked_fill(~mask, -np.inf)

    def gradient(rate: float) -> torch.Tensor:
        attention = functools.partial(functional.scaled_dot_product_attention, dropout_p=rate)
        result = passed(context(), lambda x: attention(x, x, x, mask), x, 0)
        return torch.autograd.grad(result.square().sum(), x)[0]

    torch.testing.assert_close(gradient(1e-7), gradient(0.0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "module",
    [
        nn.MultiheadAttention(4, 2, dropout=0.5),
        nn.TransformerEncoderLayer(4, 2, 4, dropout=0.5),
        nn.TransformerDecoderLayer(4, 2, 4, dropout=0.5),
    ],
)
def test_modules_whose_batch_is_not_first_are_refused(module: nn.Module) -> None:
    with pytest.raises(SpecError, match="MultiheadAttention with dropout and without batch_first"):
        draw_by_sample(nn.Sequential(module))


def test_attention_that_returns_its_weights_is_refused() -> None:
    """Its weights have the shape `[batch * heads, ...]`, with which one head passes for a batch."""
    module = nn.MultiheadAttention(4, 1, dropout=0.5, batch_first=True)
    draw_by_sample(module)
    x = torch.ones(2, 3, 4)
    passed(context(), lambda x: module(x, x, x, need_weights=False)[0], x, 0)
    with pytest.raises(SpecError, match="MultiheadAttention without need_weights=False"):
        passed(context(), lambda x: module(x, x, x)[0], x, 0)
    module.eval()
    passed(context(), lambda x: module(x, x, x)[0], x, 0)


def test_draws_of_other_threads_are_not_refused() -> None:
    """A thread that reads samples draws during the pass, as transforms do."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        reader = threading.Thread(target=torch.rand, args=(3,))
        reader.start()
        reader.join()
        return x * 2

    passed(context(), compute, torch.ones(2, 3), 0)


def test_operations_that_draw_nothing_are_not_refused() -> None:
    """Attention without dropout, LSTMs, and rrelu outside of training."""
    lstm = nn.LSTM(3, 3, batch_first=True)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(functional.scaled_dot_product_attention(x, x, x) + lstm(x)[0])

    passed(context(), compute, torch.ones(2, 4, 3), 0)


def test_other_draws_are_refused_in_every_shape() -> None:
    """Inputs of a new shape are checked again, so that a draw for one shape alone is refused."""
    step, x = context(), torch.ones(2, 3)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(()) if len(x) == 1 else x

    assert torch.equal(passed(step, compute, x, 0), x)
    assert torch.equal(passed(step, compute, x, 0), x)
    with pytest.raises(SpecError, match=r"aten\.rand\.default of the model"):
        passed(step, compute, x[:1], 0)


@pytest.mark.parametrize(
    "fields",
    [{}, {"random_layers": "per-replica", "reproducible": "bits"}],
    ids=["samples", "bits"],
)
def test_draws_that_begin_later_are_refused(fields: dict[str, Any]) -> None:
    """Passes 1, 2, 4, 8, ... are checked: a dropout that is on from pass 6 ends pass 8."""
    step, x, passes = context(**fields), torch.ones(2, 3), itertools.count(1)

    def compute(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(()) if next(passes) >= 6 else x

    for _ in range(7):
        passed(step, compute, x, 0)
    with pytest.raises(SpecError, match=r"aten\.rand\.default of the model"):
        passed(step, compute, x, 0)


def test_reproducible_runs_refuse_draws_by_replica() -> None:
    step = context(random_layers="per-replica", reproducible="bits")
    with pytest.raises(SpecError, match=r"reproducible: the operation .* by replica"):
        passed(step, functional.dropout, torch.ones(2, 3), 0)
    x = torch.ones(3, 3)
    assert torch.equal(passed(step, lambda x: x * 2, x, 0), x * 2)


def test_other_axes_are_refused() -> None:
    draw_by_sample(nn.Dropout())
    with pytest.raises(SpecError, match="expected 2 samples"):
        passed(context(), lambda x: functional.dropout(x.T), torch.ones(2, 3), 0)


def test_dropout_inside_of_a_kernel_is_refused() -> None:
    with pytest.raises(SpecError, match=r"the module 0 \(LSTM with dropout\)"):
        draw_by_sample(nn.Sequential(nn.LSTM(2, 2, 2, dropout=0.5)))


def test_public_functions_give_means_outside_of_passes() -> None:
    x, draw = torch.ones(2, 3), isotrain.random
    assert torch.equal(draw.uniform(x, 1, 3), x * 2)
    assert torch.equal(draw.normal(x, mean=4), x * 4)
    assert torch.equal(draw.bernoulli(x, 0.25), x / 4)
    assert draw.dropout(x, 0.5) is x
    context(random_layers="per-replica")
    with pytest.raises(SpecError, match="random_layers: per-sample"):
        draw.normal(x)
