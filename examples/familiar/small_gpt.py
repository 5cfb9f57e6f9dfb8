"""A small GPT as people of torch write it: a native `torch.nn.Module`, at torch's full speed.

isotrain run examples/familiar/small_gpt.py:spec --backend torch-ddp --replicas 2
"""

from __future__ import annotations

from typing import Any

import numpy as np

import isotrain

LENGTH, VOCABULARY = 16, 32


def model(width: int = 32, heads: int = 2, layers: int = 2) -> Any:
    """Embeddings, blocks with causal attention, and a head."""
    import torch
    from torch import nn

    class GPT(nn.Module):
        """Language model from int64 [texts, LENGTH] to logits [texts, LENGTH, VOCABULARY]."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.places = nn.Embedding(LENGTH, width)
            block = nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

        def forward(self, texts: Any) -> Any:
            x = self.tokens(texts) + self.places(torch.arange(LENGTH, device=texts.device))
            return self.head(self.blocks(x, mask=self.mask, is_causal=True))

    return GPT()


def next_token_loss(output: Any, target: Any) -> Any:
    """Cross-entropy as in any torch loop; the names say that the predictions come first."""
    from torch.nn import functional

    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def data(samples: int = 64) -> isotrain.DataSet:
    """Texts that count upwards from somewhere, and the same one token on."""
    starts = np.random.default_rng(0).integers(VOCABULARY, size=(samples, 1))
    texts = (starts + np.arange(LENGTH + 1)) % VOCABULARY
    return isotrain.DataSet((texts[:, :-1], texts[:, 1:]))


spec = isotrain.TrainingSpec(
    name="small-gpt",
    model={"torch": model},
    data=data,
    loss=next_token_loss,
    optimizer={"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
    clip={"global_norm": 1.0},
    schedule={"name": "cosine", "warmup_steps": 2},
    global_batch_size=16,
    epochs=3,
)
