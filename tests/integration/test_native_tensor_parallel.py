"""Strategy `tensor` with native modules, which torch's `parallelize_module` cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance.backends import param

import isotrain
from isotrain.core.errors import RunFailedError

STYLES = {
    "words": "rowwise",
    "blocks.*.query": "colwise",
    "blocks.*.key": "colwise",
    "blocks.*.value": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "classes": "colwise-gather",
}


def cut(degree: int = 2, **layers: str) -> dict[str, Any]:
    options = {"degree": degree, "layers": layers or STYLES}
    return {"strategy": {"name": "tensor", "options": options}}


def transformer(rate: float = 0.0, tied: bool = False) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))
            self.scores, self.out = nn.Dropout(rate), nn.Linear(8, 8)
            self.norm = nn.LayerNorm(8)
            self.up, self.drop, self.down = nn.Linear(8, 12), nn.Dropout(rate), nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            query, key, value = (
                each(x).view(batch, length, -1, 2).transpose(1, 2)
                for each in (self.query, self.key, self.value)
            )
            scores = self.scores(torch.softmax(query @ key.transpose(-1, -2), -1))
            heads = (scores @ value).transpose(1, 2).reshape(batch, length, -1)
            x = self.norm(x + self.out(heads))
            return x + self.down(self.drop(functional.silu(self.up(x))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(12, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.classes = nn.Linear(8, 4)
            if tied:
                self.blocks[1].up.weight = self.blocks[0].up.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            for block in self.blocks:
                x = block(x)
            return self.classes(x.mean(1))

    return Transformer()


def with_hidden_draws() -> Any:
    """A model that draws between cut modules without a Dropout."""
    from torch import nn
    from torch.nn import functional

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 12), nn.Linear(12, 4)

        def forward(self, tokens: Any) -> Any:
            hidden = functional.dropout(self.up(self.words(tokens).mean(1)), 0.5, self.training)
            return self.down(hidden)

    return Net()


def between(kind: str) -> Any:
    """A model that uses a weight, or outputs of one (`gate`), between cut modules."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm = nn.Embedding(12, 8), nn.LayerNorm(8)
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)
            self.before = nn.Linear(8, 8)
            self.after = nn.PReLU()
            if kind == "prelu":
                self.act = nn.PReLU()
            elif kind == "head-norm":
                self.act = nn.LayerNorm(3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.before(self.words(tokens).mean(1)))
            if kind == "checkpoint":
                return self.after(checkpoint(self.mlp, x, use_reentrant=False))
            return self.after(self.mlp(x))

        def mlp(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.up(x)
            if kind == "prelu":
                hidden = self.act(hidden)
            elif kind == "head-norm":
                hidden = self.act(hidden.view(len(x), -1, 3)).flatten(1)
            elif kind == "gate":
                hidden = hidden * x[:, :1]
            return self.down(hidden)

    return Net()


def tokens() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 12, (22, 5), np.int64), generator.integers(0, 4, 22)


SPEC = {
    "model": {"torch": transformer},
    "data": tokens,
    "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
    "optimizer": {"name": "adamw", "lr": 0.0625, "weight_decay": 0.25},
    "clip": {"global_norm": 0.5},
    "gradient_accumulation_steps": 2,
    "global_batch_size": 8,
    "epochs": 2,
    "seed": 1,
    "precision": "float64",
    "threads": 1,
}


def trained(
    replicas: int, folder: Path, name: str = "run", resume: Any = None, **fields: Any
) -> Any:
    return isotrain.run(
        {**SPEC, **fields},
        backend="torch-ddp",
        replicas=replicas,
        output=folder / f"{name}-{replicas}",
        quiet=True,
        **({} if resume is None else {"resume": resume}),
    )


def assert_equal(result: Any, expected: Any) -> None:
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        np.testing.assert_allclose(result.weights[name], weight, 0, 1e-12, err_msg=name)
    np.testing.assert_allclose(result.last_loss, expected.last_loss, 0, 1e-12)


MEASURED = {"gradient_norm": True, "ema": {"decay": 0.875}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "degree"),
    [(1, 2), *[param(*each, features=True) for each in ((2, 2), (1, 4))]],
)
def test_cut_modules_train_as_one_replica(tmp_path: Path, replicas: int, degree: int) -> None:
    expected = trained(1, tmp_path, "one", **MEASURED)
    assert_equal(trained(replicas, tmp_path, **MEASURED, **cut(degree)), expected)


@pytest.mark.slow
def test_dropout_drops_the_same_between_cut_modules(tmp_path: Path) -> None:
    fields = {"model_args": {"rate": 0.25}}
    expected = trained(2, tmp_path, "whole", **fields)
    assert_equal(trained(2, tmp_path, **fields, **cut()), expected)


SEQUENCE = {
    "words": "rowwise-sequence",
    "*norm": "sequence",
    "query": "sequence-colwise",
    "out": "rowwise-sequence",
    "up": "sequence-colwise",
    "down": "rowwise-sequence",
    "classes": "sequence-colwise-gather",
}


def sequences(rate: float, numbered: str = "") -> Any:
    """A transformer block whose positions meet in the attention and at the end.

    Args:
        rate: Rate of its dropout.
        numbered: Embeds the positions too, given as `samples` (with that axis) or `bare`; empty for none.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.first_norm, self.norm = (
                nn.Embedding(12, 8),
                nn.LayerNorm(8),
                nn.RMSNorm(8),
            )
            self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
            self.up, self.drop, self.down = nn.Linear(8, 12), nn.Dropout(rate), nn.Linear(12, 8)
            self.classes = nn.Linear(8, 4)
            self.places = nn.Embedding(6, 8) if numbered else None

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens)
            if self.places is not None:
                numbers = torch.arange(tokens.shape[1])
                x = x + self.places(numbers if numbered == "bare" else numbers[None])
            x = self.drop(x)
            heads = self.query(self.first_norm(x)).unflatten(-1, (-1, 2)).transpose(1, 2)
            found = functional.scaled_dot_product_attention(heads, heads, heads)
            x = x + self.out(found.transpose(1, 2).flatten(2))
            x = x + self.down(functional.silu(self.up(self.norm(x))))
            return self.classes(x).mean(1)

    return Block()


def even_tokens(length: int = 6) -> Any:
    generator = np.random.default_rng(0)
    return generator.integers(0, 12, (22, length)), generator.integers(0, 4, 22)


@pytest.mark.features
@pytest.mark.parametrize(("replicas", "rate"), [(1, 0.25), (2, 0.0)])
def test_activations_cut_along_positions_train_as_whole_ones(
    tmp_path: Path, replicas: int, rate: float
) -> None:
    """With cut dropout too; two replicas draw other numbers than one."""
    fields = {"model": {"torch": sequences}, "model_args": {"rate": rate}, "data": even_tokens}
    expected = trained(1, tmp_path, "one", **fields, **MEASURED)
    found = trained(replicas, tmp_path, **fields, **MEASURED, **cut(**SEQUENCE))
    assert_equal(found, expected)


@pytest.mark.features
def test_an_embedding_of_positions_is_cut_along_them(tmp_path: Path) -> None:
    """It is given them as those of one sample; without that axis it is refused."""
    fields = {"model": {"torch": sequences}, "data": even_tokens}
    given = {"rate": 0.0, "numbered": "samples"}
    styles = cut(**SEQUENCE, places="rowwise-sequence")
    expected = trained(1, tmp_path, "one", **fields, model_args=given)
    assert_equal(trained(1, tmp_path, **fields, model_args=given, **styles), expected)
    with pytest.raises(
        RunFailedError, match=r"places: .* expected inputs \[samples, .* shape \[6\]\. Give it one"
    ):
        trained(1, tmp_path, "bare", **fields, model_args={**given, "numbered": "bare"}, **styles)


@pytest.mark.features
def test_positions_that_have_no_equal_parts_are_refused(tmp_path: Path) -> None:
    fields = {"model": {"torch": sequences}, "model_args": {"rate": 0.0}, "data": even_tokens}
    with pytest.raises(
        RunFailedError, match=r"words: rowwise-sequence .* multiple of degree 2, rec"
    ):
        trained(1, tmp_path, **fields, data_args={"length": 5}, **cut(**SEQUENCE))


@pytest.mark.slow
def test_norms_are_those_of_whole_weights(tmp_path: Path) -> None:
    fields = {"optimizer": {"name": "lamb", "lr": 0.0625}, "clip": {"norm": 0.25}}
    expected = trained(1, tmp_path, "one", **fields)
    assert_equal(trained(1, tmp_path, **fields, **cut()), expected)


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_any_strategy(tmp_path: Path) -> None:
    fields = {"epochs": None, "checkpoint": {"every_steps": 2}}
    expected = trained(1, tmp_path, "one", steps=6, **fields)
    before = None
    sharded = {"strategy": {"name": "sharded", "options": {"stage": 3}}}
    for part, (replicas, strategy) in enumerate([(1, cut()), (2, sharded), (1, cut(4))]):
        resume = None if before is None else before.run_directory
        steps = 2 * part + 2
        before = trained(replicas, tmp_path, f"{part}", resume, steps=steps, **fields, **strategy)
    assert_equal(before, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"strategy": "tensor"}, r"expected names of Linear .* can be cut here: words, blocks\.0"),
        (cut(nope="colwise"), r"'nope': no Linear or Embedding has such a name"),
        (cut(words="sequence"), r"'words': no LayerNorm or RMSNorm has such a name"),
        (cut(classes="columns"), r"'classes': expected colwise, .* received 'columns'"),
        (cut(3), r"words: rowwise cuts axis 0 .* expected a multiple of degree 3|query: colwise"),
        (cut(classes="colwise"), r"returns a shape \[\d+, 2\], other than \[\d+, 4\], than"),
        (cut(classes="rowwise"), r"the parts of the modules do not fit together"),
        (
            {"model_args": {"tied": True}, **cut()},
            r"blocks\.[01]\.up\.weight is tied, .* Leave blocks\.[01]\.up out",
        ),
        (
            {"initial_weights": {"freeze": "blocks.0.up.*"}, **cut()},
            r"blocks\.0\.up\.\w+ is frozen",
        ),
        (
            {"model": {"torch": with_hidden_draws}, **cut(up="colwise", down="rowwise")},
            r"draws other random numbers than the uncut one",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RunFailedError, match=reason):
        trained(1, tmp_path, **fields)


@pytest.mark.parametrize(
    ("kind", "precision", "names"),
    [
        ("prelu", "float64", r"act\.weight"),
        pytest.param("head-norm", "float32", r"act\.weight, act\.bias", marks=pytest.mark.slow),
        pytest.param("head-norm", "bfloat16", r"act\.weight, act\.bias", marks=pytest.mark.slow),
        pytest.param("gate", "float64", r"words\.weight, norm\.weight", marks=pytest.mark.slow),
    ],
)
def test_other_gradients_are_refused(tmp_path: Path, kind: str, precision: str, names: str) -> None:
    fields = {"model": {"torch": between}, "model_args": {"kind": kind}, "precision": precision}
    styles = cut(words="rowwise", up="colwise", down="rowwise")
    with pytest.raises(RunFailedError, match=rf"layers: {names}.*: the gradient .* is not that"):
        trained(1, tmp_path, **fields, **styles)


@pytest.mark.slow
def test_uncut_weights_outside_have_whole_gradients(tmp_path: Path) -> None:
    fields = {"model": {"torch": between}, "model_args": {"kind": "checkpoint"}}
    expected = trained(1, tmp_path, "one", **fields)
    styles = cut(words="rowwise", up="colwise", down="rowwise")
    assert_equal(trained(1, tmp_path, **fields, **styles), expected)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_that_round_otherwise_are_accepted(tmp_path: Path, precision: str) -> None:
    result = trained(1, tmp_path, precision=precision, steps=1, epochs=None, **cut())
    assert np.isfinite(result.last_loss)


@pytest.mark.slow
def test_horovod_has_no_process_groups_to_cut_over(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="which this backend does not have"):
        isotrain.run(
            {**SPEC, **cut()}, backend="horovod-torch", replicas=1, output=tmp_path, quiet=True
        )


@pytest.mark.slow
def test_the_layers_of_a_portable_model_have_no_styles(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="expected their names, without styles"):
        trained(1, tmp_path, model=portable, **cut())


def portable() -> Any:
    import keras

    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(4)])


def notes(session: isotrain.Session) -> list[str]:
    return [each for each in session.setup_notes() if each.startswith("tensor: ")]


@pytest.mark.slow
def test_the_plan_says_what_is_cut_and_communicated(tmp_path: Path) -> None:
    found, _ = isotrain.launch(
        notes, {**SPEC, **cut()}, backend="torch-ddp", replicas=1, output=tmp_path
    )
    assert len(found) == 14
    assert (
        "tensor: blocks.0.up: colwise: cut weight [12, 8] to [6, 8] here; the parts sum 8 numbers a position"
        " backward" in found
    )
    assert (
        "tensor: words: rowwise: cut weight [12, 8] to [6, 8] here; the parts sum 8 numbers a position"
        " forward" in found
    )
