"""How do I fine-tune a model of Hugging Face, and save it with `save_pretrained`?

`objective: isotrain:model_loss` calls the model by keywords and takes the loss that it returns. Labels of
-100 are left out, and the mean over the global batch is exact.

    python examples/by_need/hugging_face.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import isotrain

BACKENDS = ("torch-ddp", "horovod-torch")  # transformers has no models for TensorFlow any more
TOKENS, LENGTH = 40, 12


def model() -> Any:
    """A small GPT-2; `GPT2LMHeadModel.from_pretrained(name)` works as well."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def data() -> isotrain.DataSet:
    """Counting sequences of 4 to 12 tokens, padded; labels are the tokens, and -100 for padding."""
    random = np.random.default_rng(0)
    tokens = (random.integers(TOKENS, size=(90, 1)) + np.arange(LENGTH)) % TOKENS
    mask = np.arange(LENGTH) < random.integers(4, LENGTH + 1, size=(90, 1))
    inputs = {"input_ids": tokens, "attention_mask": mask.astype("int64")}
    labels = np.where(mask, tokens, -100)
    return isotrain.DataSet(isotrain.sources.arrays(inputs=inputs, targets=labels))


spec = isotrain.TrainingSpec(
    name="hugging-face",
    model={"torch": model},
    data=data,
    call=lambda network, inputs: network(**inputs).logits,
    objective=isotrain.model_loss,
    optimizer={"name": "adamw", "lr": 0.001, "weight_decay": 0.01},
    global_batch_size=32,
    epochs=2,
)


def save(result: isotrain.RunResult, folder: Path) -> None:
    """Saves the trained model for `from_pretrained`: its weights have the names of the `state_dict`."""
    import torch

    network = model()
    trained = {name: torch.from_numpy(weight) for name, weight in result.weights.items()}
    missing, unexpected = network.load_state_dict(trained, strict=False)
    assert not unexpected  # tied weights are in `weights` once
    assert set(missing) <= {"lm_head.weight"}
    network.save_pretrained(folder)


if __name__ == "__main__":
    save(isotrain.run(spec, backend="torch-ddp", replicas=2), Path("trained"))
