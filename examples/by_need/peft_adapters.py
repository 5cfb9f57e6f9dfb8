"""How do I train adapters of `peft` on a model of Hugging Face, and export them alone?

python examples/by_need/peft_adapters.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import isotrain

BACKENDS = ("torch-ddp", "horovod-torch")  # peft is for torch alone
TOKENS, LENGTH = 40, 8


def model() -> Any:
    """A small BERT with adapters in its attention layers, and a new head."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    adapters = LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(BertForSequenceClassification(config), adapters)


def data() -> isotrain.DataSet:
    """Sentences; the class is that of the first token."""
    tokens = np.random.default_rng(0).integers(TOKENS, size=(90, LENGTH))
    inputs = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    return isotrain.DataSet(isotrain.sources.arrays(inputs=inputs, targets=tokens[:, 0] % 3))


spec = isotrain.TrainingSpec(
    name="peft-adapters",
    model={"torch": model},
    data=data,
    objective=isotrain.model_loss,
    optimizer={"name": "sgd", "lr": 0.125},
    global_batch_size=32,
    epochs=2,
)


def export_adapters(result: isotrain.RunResult, path: Path) -> Path:
    """Writes the adapters and the head, by the names that `peft` gives them in the model."""
    return result.export(path, include=["*lora_*", "*modules_to_save*"])


if __name__ == "__main__":
    export_adapters(isotrain.run(spec, backend="torch-ddp", replicas=2), Path("a.safetensors"))
