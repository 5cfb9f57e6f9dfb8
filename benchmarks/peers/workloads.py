"""Workloads of the contenders: samples, their order, and the numbers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

CLASSES = 10
MOMENTUM = 0.875
BETA_1 = 0.5
SEED = 0
VOCABULARY = 256
NOISE, EMBEDDING, TEMPERATURE = 64, 128, 0.125
"""Of DCGAN the length of the noise; of CLIP that of the embeddings, and what divides their products."""
LOOPS = ("dcgan", "clip")
"""Workloads that need more than a model, a loss and an optimizer."""


@dataclass(frozen=True)
class Workload:
    """A model with its data.

    Attributes:
        name: Name of the functions that build it, with `-` as `_`, up to the width.
        width: Width of an MLP's hidden layers; 0 where the model has but one size.
        sample: Shape of one sample, channels last; of an int32 one when `tokens`.
        global_batch_size: Samples of a step, over all replicas.
        steps_per_epoch: Steps over all samples.
        first_epochs: Epochs whose steps are not timed.
        timed_epochs: Epochs after these, which are.
        tolerance: Relative difference up to which the losses of two contenders agree.
        tokens: Whether samples are numbers of words.
        rate: The learning rate; smaller where rounding would grow.
        rounding_grows: Whether it does all the same, to percents within the run, so that only the losses of
            the steps that are not timed are compared.
        normalises_batches: Whether each replica normalises its own part of a batch, so that the losses of one
            replica are not those of two.
        ema: Decay of a moving average of the weights; 0 for none.
        contenders: Names of the contenders that have a program for it; empty for all.
    """

    name: str
    width: int
    sample: tuple[int, ...]
    global_batch_size: int
    steps_per_epoch: int
    first_epochs: int
    timed_epochs: int
    tolerance: float
    tokens: bool = False
    rate: float = 2**-6
    rounding_grows: bool = False
    normalises_batches: bool = False
    ema: float = 0.0
    contenders: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Number of samples in the data set."""
        return self.global_batch_size * self.steps_per_epoch

    @property
    def epochs(self) -> int:
        """Number of epochs of a whole run."""
        return self.first_epochs + self.timed_epochs

    @property
    def first_steps(self) -> int:
        """Steps that are not timed."""
        return self.first_epochs * self.steps_per_epoch

    @property
    def steps(self) -> int:
        """Number of steps of a whole run."""
        return self.epochs * self.steps_per_epoch

    @property
    def compared(self) -> int:
        """Number of mean losses that are compared: of the untimed steps and, if 2, of the timed ones."""
        return 1 if self.rounding_grows else 2

    @property
    def function(self) -> str:
        """The name of the function that builds the model."""
        return self.name.removesuffix(f"-{self.width}").replace("-", "_")

    def arrays(self, channels_first: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The samples, float32 or int32, and their classes, int64.

        DCGAN has noise and images, float32, instead; and CLIP images, float32, and their tokens, int32.
        """
        generator = np.random.default_rng(SEED)
        shape = (self.samples, *self.sample)
        if self.tokens:
            inputs = generator.integers(0, VOCABULARY, shape).astype(np.int32)
        else:
            inputs = generator.standard_normal(shape).astype(np.float32)
        if channels_first and len(self.sample) == 3:
            inputs = np.ascontiguousarray(inputs.transpose(0, 3, 1, 2))
        if self.name == "dcgan":
            noise = generator.standard_normal((self.samples, NOISE)).astype(np.float32)
            return noise, np.tanh(inputs)
        if self.name == "clip":
            return inputs, generator.integers(0, VOCABULARY, (self.samples, 32)).astype(np.int32)
        return inputs, generator.integers(0, CLASSES, self.samples)

    def order(self, epoch: int) -> np.ndarray:
        """Indices of an epoch's samples, int64 `[samples]`, in the order in which isotrain takes them."""
        sequence = np.random.SeedSequence(SEED, spawn_key=(epoch,))
        return np.random.Generator(np.random.PCG64(sequence)).permutation(self.samples)

    def dealt(self, epoch: int, replicas: int) -> np.ndarray:
        """The order, int64 `[samples]`, for samplers that deal samples out one by one to replicas."""
        by_replica = self.order(epoch).reshape(-1, replicas, self.global_batch_size // replicas)
        return by_replica.swapaxes(1, 2).ravel()

    def local_batches(self, rank: int, replicas: int) -> Iterator[np.ndarray]:
        """This replica's sample indices, int64, of every global batch of a whole run."""
        share = self.global_batch_size // replicas
        for epoch in range(self.epochs):
            order = self.order(epoch)
            for start in range(rank * share, self.samples, self.global_batch_size):
                yield order[start : start + share]


_BY_HAND = (
    "torch-ddp",
    "isotrain/torch-ddp/native",
    "tf-multiworker",
    "isotrain/tf-multiworker/native",
)
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp-64", 64, (64,), 64, 16, 4, 160, 1e-3),
        Workload("mlp-1024", 1024, (64,), 64, 16, 2, 24, 1e-3),
        Workload("cnn", 0, (32, 32, 3), 32, 8, 2, 60, 1e-3),
        Workload("transformer", 0, (32,), 32, 8, 2, 16, 1e-3, tokens=True, rate=2**-10),
        Workload(
            "resnet-50",
            0,
            (64, 64, 3),
            16,
            4,
            1,
            3,
            5e-3,
            rate=2**-18,
            rounding_grows=True,
            normalises_batches=True,
        ),
        Workload("mlp-512", 512, (64,), 64, 16, 4, 60, 1e-3, ema=0.999, contenders=_BY_HAND),
        Workload(
            "dcgan",
            0,
            (32, 32, 3),
            32,
            8,
            1,
            12,
            1e-2,
            rate=2**-12,
            rounding_grows=True,
            normalises_batches=True,
            contenders=_BY_HAND,
        ),
        Workload("clip", 0, (32, 32, 3), 32, 8, 2, 30, 1e-3, contenders=_BY_HAND),
    )
}


def start_value(layer: str, shape: tuple[int, ...]) -> np.ndarray:
    """Initial float32 kernel of a layer, shape with inputs before outputs; the same in every framework."""
    generator = np.random.default_rng([SEED, *layer.encode()])
    size = int(np.prod(shape))
    drawn = generator.standard_normal(shape) * size**-0.25
    return drawn.astype(np.float32)
