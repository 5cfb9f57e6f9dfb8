"""Streams of other libraries, which note the samples that they read in a file."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES, BATCH = 30, 5


def note(file: str, number: int) -> None:
    """Adds a line to a file."""
    with Path(file).open("a") as stream:
        stream.write(f"{number}\n")


def sample(number: int) -> tuple[np.ndarray, int]:
    """Inputs and target of a sample."""
    return np.random.default_rng(number).standard_normal(4), number % 3


class Noted:
    """Samples by their number, each reading of which is a line in a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        note(self.file, number)
        inputs, target = sample(number)
        return inputs, np.array(target)


def of_torchdata(file: str, workers: int) -> Any:
    """Shuffled by a seed that torch draws."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from isotrain import sources

    loader = StatefulDataLoader(Noted(file), BATCH, shuffle=True, num_workers=workers)
    return sources.stream(loader, SAMPLES)


def of_grain(file: str, workers: int) -> Any:
    """Shuffled by Grain."""
    import grain

    from isotrain import sources

    samples = grain.MapDataset.source(Noted(file)).seed(3).shuffle()
    options = grain.ReadOptions(num_threads=workers)
    return sources.stream(samples.to_iter_dataset(options).batch(BATCH), SAMPLES)


def of_torchdata_nodes(file: str, workers: int) -> Any:
    """Samples of a graph of torchdata's nodes."""
    from torchdata import nodes

    from isotrain import sources

    numbers = nodes.IterableWrapper(range(SAMPLES))
    samples = nodes.ParallelMapper(numbers, Noted(file).__getitem__, workers, method="thread")
    return sources.sample_stream(nodes.Loader(samples), samples=SAMPLES)


def of_grain_samples(file: str, workers: int) -> Any:
    """Single samples of Grain."""
    import grain

    from isotrain import sources

    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=2)
    samples = grain.MapDataset.source(Noted(file)).seed(3).shuffle().to_iter_dataset(options)
    return sources.sample_stream(samples, samples=SAMPLES)


def noted_rows(shards: list[range], file: str) -> Iterator[dict[str, Any]]:
    """The samples of shards, as a generator for Hugging Face."""
    for shard in shards:
        for number in shard:
            note(file, number)
            inputs, target = sample(number)
            yield {"x": inputs, "y": target, "text": f"sample {number}"}


def hugging_face(file: str) -> Any:
    """A streamed data set in three shards."""
    import datasets

    shards = [range(start, start + 10) for start in range(0, SAMPLES, 10)]
    arguments = {"shards": shards, "file": file}
    rows = datasets.IterableDataset.from_generator(noted_rows, gen_kwargs=arguments)
    return rows.with_format("numpy")


def of_hugging_face(file: str, workers: int) -> Any:
    """Streamed by Hugging Face, in the order of the shards."""
    from isotrain import sources

    return sources.sample_stream(hugging_face(file), "x", "y", samples=SAMPLES)


def of_hugging_face_shards(file: str, workers: int) -> Any:
    """Streamed by Hugging Face, one sample of each shard in turn."""
    from isotrain import sources

    return sources.sample_stream(hugging_face(file), "x", "y", samples=SAMPLES, shards=3)


def of_hugging_face_by_position(file: str, workers: int) -> Any:
    """A data set of Hugging Face by position, whose transform makes the samples."""
    import datasets

    from isotrain import sources

    def made(columns: dict[str, Any]) -> dict[str, Any]:
        for number in columns["number"]:
            note(file, number)
        inputs, targets = zip(*map(sample, columns["number"]), strict=True)
        return {"x": np.stack(inputs), "y": np.array(targets)}

    rows = datasets.Dataset.from_dict({"number": range(SAMPLES)}).with_transform(made)
    return sources.BatchIndexed(rows, "x", "y")


def of_hugging_face_lengths(file: str, workers: int) -> Any:
    """Streamed by Hugging Face, in shards of known lengths; each process notes what it reads itself."""
    from isotrain import sources

    rows = hugging_face(f"{file}-{os.getpid()}")
    return sources.sample_stream(rows, "x", "y", samples=[10, 10, 10])


def of_hugging_face_shuffled(file: str, workers: int) -> Any:
    """Streamed by Hugging Face with a shuffle buffer, which its state does not have."""
    from isotrain import sources

    rows = hugging_face(file).shuffle(seed=3, buffer_size=8)
    return sources.sample_stream(rows, "x", "y", samples=SAMPLES)


def tensorflow_dataset(file: str, numbers: Any) -> Any:
    """Samples of `tf.data` by their number."""
    import tensorflow as tf

    def made(number: Any) -> tuple[np.ndarray, np.ndarray]:
        note(file, int(number))
        inputs, target = sample(int(number))
        return inputs, np.int64(target)

    def shaped(number: Any) -> tuple[Any, Any]:
        inputs, target = tf.numpy_function(made, [number], [tf.float64, tf.int64])
        return tf.ensure_shape(inputs, (4,)), tf.ensure_shape(target, ())

    return numbers.map(shaped)


def of_tensorflow(file: str, workers: int) -> Any:
    """Batches of `tf.data`, shuffled in another order in each epoch."""
    import tensorflow as tf

    from isotrain import sources

    numbers = tf.data.Dataset.range(SAMPLES).shuffle(SAMPLES, seed=3)
    return sources.stream(tensorflow_dataset(file, numbers).batch(BATCH), SAMPLES)


def of_tensorflow_samples(file: str, workers: int) -> Any:
    """Single samples of `tf.data`."""
    import tensorflow as tf

    from isotrain import sources

    samples = tensorflow_dataset(file, tf.data.Dataset.range(SAMPLES))
    return sources.sample_stream(samples, samples=SAMPLES)


def of_tensorflow_shards(file: str, workers: int) -> Any:
    """Batches of `tf.data`, one of each shard in turn."""
    import tensorflow as tf

    from isotrain import sources

    def shard(index: int, shards: int) -> Any:
        numbers = tf.data.Dataset.range(SAMPLES).shard(shards, index)
        return tensorflow_dataset(file, numbers).batch(BATCH)

    return sources.stream(shard, SAMPLES, shards=4)


def webdataset_of(file: str) -> Any:
    """A shuffled data set of WebDataset, in two shards that are written first."""
    import webdataset

    folder = Path(file).with_name("shards")
    folder.mkdir(exist_ok=True)
    for shard in range(2):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(15 * shard, 15 * shard + 15):
                inputs, target = sample(number)
                writer.write({"__key__": f"{number:03}", "x.npy": inputs, "y.cls": target})

    def noted(fields: dict[str, Any]) -> dict[str, Any]:
        note(file, int(fields["__key__"]))
        return fields

    shards = webdataset.WebDataset(f"{folder}/{{0..1}}.tar", shardshuffle=False)
    return shards.shuffle(8, seed=3).decode().map(noted)


def of_webdataset(file: str, workers: int) -> Any:
    """Streamed by WebDataset."""
    from isotrain import sources

    return sources.sample_stream(webdataset_of(file), "x.npy", "y.cls", samples=SAMPLES)


def of_webdataset_shards(file: str, workers: int) -> Any:
    """Streamed by WebDataset, one sample of each shard in turn."""
    from isotrain import sources

    data = webdataset_of(file)
    return sources.sample_stream(data, "x.npy", "y.cls", samples=SAMPLES, shards=2)


def of_mosaic(file: str, workers: int) -> Any:
    """Shuffled by MosaicML Streaming, from shards that are written first."""
    from isotrain import sources

    return sources.sample_stream(mosaic_dataset(file), "x", "y")


def of_mosaic_by_position(file: str, workers: int) -> Any:
    """Samples of MosaicML Streaming by position."""
    from isotrain import sources

    return sources.MapStyle(mosaic_dataset(file), inputs="x", targets="y")


def mosaic_dataset(file: str) -> Any:
    """A data set of MosaicML Streaming, whose shards are written first."""
    import_streaming()
    from streaming import MDSWriter, StreamingDataset

    class NotedDataset(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            fields = super().__getitem__(at)
            note(file, int(at))
            return fields

    folder = Path(file).with_name("shards")
    if not folder.exists():
        columns = {"x": "ndarray:float64:4", "y": "int"}
        with MDSWriter(out=str(folder), columns=columns, size_limit=400) as writer:
            for inputs, target in map(sample, range(SAMPLES)):
                writer.write({"x": inputs, "y": target})
    return NotedDataset(local=str(folder), shuffle=True, shuffle_seed=3, batch_size=BATCH)


def import_streaming() -> None:
    """Imports MosaicML Streaming without torchvision, which its data sets of images alone use.

    torchvision from PyPI needs the torch of its own release, with CUDA.
    """
    import transformers.feature_extraction_utils
    import transformers.tokenization_utils_base  # noqa: F401

    names = ("torchvision", "torchvision.datasets", "torchvision.transforms.functional")
    stubs = {name: types.ModuleType(name) for name in (*names, "torchvision.transforms")}
    stubs["torchvision.datasets"].VisionDataset = object
    stubs["torchvision.transforms.functional"].to_tensor = None
    sys.modules.update({name: sys.modules.get(name, stub) for name, stub in stubs.items()})
    import streaming  # noqa: F401


def of_litdata(file: str, workers: int) -> Any:
    """Shuffled by LitData, from chunks that are written first."""
    from isotrain import sources

    return sources.sample_stream(litdata_dataset(file), "x", "y")


def of_litdata_shards(file: str, workers: int) -> Any:
    """Shuffled by LitData, one sample of each shard in turn."""
    from isotrain import sources

    return sources.sample_stream(litdata_dataset(file), "x", "y", samples=SAMPLES, shards=3)


def of_litdata_by_position(file: str, workers: int) -> Any:
    """Samples of LitData by position."""
    from isotrain import sources

    return sources.MapStyle(litdata_dataset(file), inputs="x", targets="y")


def litdata_dataset(file: str) -> Any:
    """A data set of LitData, whose chunks are written first."""
    from litdata import StreamingDataset
    from litdata.streaming.writer import BinaryWriter

    class NotedDataset(StreamingDataset):
        def __getitem__(self, index: Any) -> Any:
            note(file, getattr(index, "index", index))
            return super().__getitem__(index)

    folder = Path(file).with_name("chunks")
    if not folder.exists():
        writer = BinaryWriter(str(folder), chunk_size=8)
        for number, (inputs, target) in enumerate(map(sample, range(SAMPLES))):
            writer[number] = {"x": inputs, "y": target}
        writer.done()
        writer.merge()
    return NotedDataset(str(folder), shuffle=True, seed=3)
