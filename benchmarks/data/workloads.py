"""The samples of the benchmark, in files that it writes once, and the models that train on them."""

from __future__ import annotations

import io
import os
import random
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

PADDING = -1
_FOLDER = Path(tempfile.gettempdir()) / "isotrain-benchmark-data"
_SIDE, _CROP = 256, 224
_RATE = 16_000
_WINDOW, _HOP = 400, 160
_VOCABULARY = 256
_RECORD = 64
_SHARD = 500


@dataclass(frozen=True)
class Workload:
    """Samples by position, or a stream of records.

    Attributes:
        name: Name of the workload.
        samples: Number of samples in an epoch.
        global_batch_size: Samples per step over all replicas.
    """

    name: str
    samples: int
    global_batch_size: int

    @cached_property
    def folder(self) -> Path:
        """Folder of the files, written if they are not there yet."""
        folder = _FOLDER / f"{self.name}-{self.samples}"
        if not folder.exists():
            _FOLDER.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=_FOLDER) as new:
                _WRITERS[self.name](Path(new), self.samples)
                os.rename(new, folder)
                Path(new).mkdir()
        return folder

    def dataset(self) -> Any:
        """A map-style data set; of a stream the function that reads it."""
        return _DATASETS[self.name](self.folder, self.samples)

    @property
    def pads(self) -> bool:
        """Whether samples have lengths of their own."""
        return self.name == "texts"


class Images:
    """JPEG files, decoded, cropped and flipped at random: uint8 `[3, 224, 224]`, and a class."""

    def __init__(self, folder: Path, samples: int) -> None:
        self.folder, self.samples = folder, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        from PIL import Image

        with Image.open(self.folder / f"{index}.jpg") as image:
            pixels = np.asarray(image)
        top, left = random.randrange(_SIDE - _CROP), random.randrange(_SIDE - _CROP)
        pixels = pixels[top : top + _CROP, left : left + _CROP]
        pixels = pixels[:, ::-1] if random.random() < 0.5 else pixels
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), index % 10


class Audio:
    """Clips of a second as log spectrograms: float32 `[98, 201]`, and a class."""

    def __init__(self, folder: Path, samples: int) -> None:
        self.folder, self.samples = folder, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        clip = np.load(self.folder / f"{index}.npy").astype(np.float32)
        frames = np.lib.stride_tricks.sliding_window_view(clip, _WINDOW)[::_HOP]
        spectrum = np.abs(np.fft.rfft(frames * np.hanning(_WINDOW)))
        return np.log1p(spectrum).astype(np.float32), index % 10


class Texts:
    """Texts of 5 to 500 tokens: tokens, and the token that follows each of them.

    Attributes:
        lengths: Number of tokens of each text, int64 `[samples]`.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        self.ends = np.load(folder / "ends.npy")
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.lengths = np.diff(self.ends, prepend=0) - 1

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        end = int(self.ends[index])
        text = np.asarray(self.tokens[end - self.lengths[index] - 1 : end], np.int64)
        return text[:-1], text[1:]


@dataclass(frozen=True)
class Stream:
    """Compressed records in shards: batches of means, float32 `[batch, 64]`, and classes; shards are counted.

    Attributes:
        folder: Folder of the shards.
        samples: Number of records.
        batch_size: Records of a batch, a divisor of 500.
    """

    folder: Path
    samples: int
    batch_size: int = 50

    def __call__(self, shard: int = 0, shards: int = 1) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The batches of every `shards`-th file."""
        for number in range(shard, self.samples // _SHARD, shards):
            count_read(_SHARD)
            blob = (self.folder / f"{number}.bin").read_bytes()
            ends = np.load(self.folder / f"{number}.npy").tolist()
            records = [blob[start:end] for start, end in pairwise([0, *ends])]
            for start in range(0, _SHARD, self.batch_size):
                batch = [_decompressed(each) for each in records[start : start + self.batch_size]]
                yield np.stack(batch), np.arange(len(batch)) % 10


def _decompressed(record: bytes) -> np.ndarray:
    """The means of a record's columns, float32 `[64]`."""
    rows = np.frombuffer(zlib.decompress(record), np.float32).reshape(-1, _RECORD)
    return rows.mean(0, dtype=np.float32)


_READS = "DATA_READS"


def count_read(records: int) -> None:
    """Adds to the records that all processes of a run have read."""
    if path := os.environ.get(_READS):
        with open(path, "ab") as file:
            file.write(b"." * records)


def _write_images(folder: Path, samples: int) -> None:
    from PIL import Image

    generator = np.random.default_rng(0)
    for index in range(samples):
        coarse = generator.integers(0, 256, (32, 32, 3), np.uint8)
        image = Image.fromarray(coarse).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=90)
        (folder / f"{index}.jpg").write_bytes(buffer.getvalue())


def _write_audio(folder: Path, samples: int) -> None:
    generator = np.random.default_rng(0)
    for index in range(samples):
        clip = generator.integers(-(2**15), 2**15, _RATE, np.int16)
        np.save(folder / f"{index}.npy", clip)


def _write_texts(folder: Path, samples: int) -> None:
    generator = np.random.default_rng(0)
    ends = np.cumsum(generator.integers(6, 502, samples))
    np.save(folder / "ends.npy", ends)
    np.save(folder / "tokens.npy", generator.integers(0, _VOCABULARY, ends[-1], np.int16))


def _write_stream(folder: Path, samples: int) -> None:
    generator = np.random.default_rng(0)
    for number in range(samples // _SHARD):
        records = generator.integers(-8, 8, (_SHARD, _RECORD, _RECORD)).astype(np.float32)
        compressed = [zlib.compress(each.tobytes(), 1) for each in records]
        (folder / f"{number}.bin").write_bytes(b"".join(compressed))
        np.save(folder / f"{number}.npy", np.cumsum([len(each) for each in compressed]))


_DATASETS: dict[str, Any] = {"images": Images, "audio": Audio, "texts": Texts, "stream": Stream}
_WRITERS = {
    "images": _write_images,
    "audio": _write_audio,
    "texts": _write_texts,
    "stream": _write_stream,
}
SAMPLES = {"images": 20_000, "audio": 4_000, "texts": 200_000, "stream": 50_000}
"""Samples of an epoch at scale 1."""
SCALES = {"images": 0.1, "audio": 0.25, "texts": 0.02, "stream": 0.4}
"""Scales of a short measurement: a run takes seconds."""


def workload(name: str, scale: float) -> Workload:
    """A workload with a fraction of its samples, a multiple of 1,000."""
    samples = max(1, round(SAMPLES[name] * scale / 1000)) * 1000
    return Workload(name, samples, 100 if name == "stream" else 64)


def collate(samples: list[tuple[np.ndarray, np.ndarray]]) -> Any:
    """Batches of texts by hand: padded to the longest."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    columns = zip(*samples, strict=True)
    inputs, targets = ([torch.from_numpy(each) for each in column] for column in columns)
    return (
        pad_sequence(inputs, batch_first=True),
        pad_sequence(targets, batch_first=True, padding_value=PADDING),
    )


def torch_model(name: str) -> Any:
    """A small model: what makes the samples takes longer."""
    import torch
    from torch import nn

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            features = {"images": 3, "audio": 201, "stream": _RECORD, "texts": 32}[name]
            self.embedding = nn.Embedding(_VOCABULARY, features) if name == "texts" else None
            self.out = nn.Linear(features, _VOCABULARY if name == "texts" else 10)

        def forward(self, inputs: Any) -> Any:
            if self.embedding is not None:
                return self.out(torch.tanh(self.embedding(inputs)))
            if name == "images":
                return self.out(inputs.float().mean((2, 3)) / 255)
            return self.out(inputs.mean(1) if name == "audio" else inputs)

    return Small()


def torch_loss(targets: Any, predictions: Any) -> Any:
    """Mean cross-entropy of classes or of tokens."""
    from torch.nn.functional import cross_entropy

    classes = predictions.shape[-1]
    return cross_entropy(
        predictions.reshape(-1, classes), targets.reshape(-1).long(), ignore_index=PADDING
    )


def tensorflow_model(name: str) -> Any:
    """The same in TensorFlow, for images."""
    import keras

    inputs = keras.Input((3, _CROP, _CROP), dtype="uint8")
    means = keras.ops.mean(keras.ops.cast(inputs, "float32"), (2, 3)) / 255
    return keras.Model(inputs, keras.layers.Dense(10)(means))
