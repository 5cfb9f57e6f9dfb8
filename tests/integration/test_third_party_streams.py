"""Streams of other libraries go on by their own state, or are read from their beginning."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from integration import third_party_streams

import isotrain
from isotrain.core.data.streaming import shards
from isotrain.core.session.training import dataloaders
from isotrain.testing.consecutive_sessions import next_session
from isotrain.testing.reference.layers import Dense
from isotrain.testing.reference.network import Network

pytestmark = [pytest.mark.usefixtures("reference"), pytest.mark.features]

STEPS, SAVED_AFTER, GLOBAL_BATCH = 17, 7, 7


def network() -> Network:
    return Network([Dense(4, 3, name="head")])


def spec(data: Any, file: Path, workers: int) -> dict[str, Any]:
    return {
        "model": {"numpy": network},
        "data": data,
        "data_args": {"file": str(file), "workers": workers},
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "sgd", "lr": 0.125},
        "precision": "float64",
        "global_batch_size": GLOBAL_BATCH,
        "steps": STEPS,
        "checkpoint": {},
        "threads": 1,
    }


def trained(session: isotrain.Session, folder: Path) -> list[float]:
    """The losses of all steps that are left; saves after some."""
    losses = []
    for batch in session.batches():
        losses.append(float(session.group.numpy(session.step(batch))))
        if session.steps_done == SAVED_AFTER:
            session.save(folder)
    return losses


def whole_and_rest(session: isotrain.Session, given: dict[str, Any], folder: Path) -> Any:
    """The losses of a run, and of one that goes on from its checkpoint with a stream made anew."""
    file = Path(given["data_args"]["file"])
    whole = trained(session, folder)
    file.unlink()
    with next_session(session, "rest", given) as again:
        again.restore(folder)
        rest = trained(again, folder)
    return whole, rest, len(file.read_text().split())


CASES = {
    "torchdata": ("torchdata", third_party_streams.of_torchdata, 0),
    "torchdata's workers": ("torchdata", third_party_streams.of_torchdata, 2),
    "torchdata's nodes": ("torchdata", third_party_streams.of_torchdata_nodes, 2),
    "grain": ("grain", third_party_streams.of_grain, 1),
    "grain, by samples": ("grain", third_party_streams.of_grain_samples, 1),
    "hugging face": ("datasets", third_party_streams.of_hugging_face, 0),
    "hugging face, in shards": ("datasets", third_party_streams.of_hugging_face_shards, 0),
    "hugging face, shuffled": ("datasets", third_party_streams.of_hugging_face_shuffled, 0),
    "hugging face, by position": ("datasets", third_party_streams.of_hugging_face_by_position, 0),
    "tf.data": ("tensorflow", third_party_streams.of_tensorflow, 0),
    "tf.data, by samples": ("tensorflow", third_party_streams.of_tensorflow_samples, 0),
    "tf.data, in shards": ("tensorflow", third_party_streams.of_tensorflow_shards, 0),
    "webdataset": ("webdataset", third_party_streams.of_webdataset, 0),
    "webdataset, in shards": ("webdataset", third_party_streams.of_webdataset_shards, 0),
    "mosaicml": ("streaming", third_party_streams.of_mosaic, 0),
    "mosaicml, by position": ("streaming", third_party_streams.of_mosaic_by_position, 0),
    "litdata": ("litdata", third_party_streams.of_litdata, 0),
    "litdata, in shards": ("litdata", third_party_streams.of_litdata_shards, 0),
    "litdata, by position": ("litdata", third_party_streams.of_litdata_by_position, 0),
}
READ_AGAIN = (
    *("hugging face, shuffled", "webdataset", "webdataset, in shards"),
    *("tf.data", "tf.data, by samples", "tf.data, in shards"),
)
"""Streams without a state from which they go on exactly."""


@pytest.mark.parametrize("case", CASES)
def test_a_stream_resumes_exactly(case: str, tmp_path: Path) -> None:
    package, data, workers = CASES[case]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed, which `make environment` does")
    given = spec(data, tmp_path / "read", workers)
    work = functools.partial(whole_and_rest, given=given, folder=tmp_path / "saved")
    ((whole, rest, read),) = isotrain.launch(
        work,
        given,
        backend="reference",
        replicas=1,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    assert rest == whole[SAVED_AFTER:]
    assert len(set(np.round(whole, 12))) == STEPS
    samples = 3 * third_party_streams.SAMPLES + 2 * GLOBAL_BATCH  # 17 steps, 5 in each epoch
    assert (read >= samples) == (case in READ_AGAIN)


def readings_of_the_last_sample(
    session: isotrain.Session, given: dict[str, Any], folder: Path
) -> Any:
    """The losses of a run and of one that goes on from its checkpoint, which reads sample 29 so often."""
    dataloaders.STREAM_STATE_SECONDS = shards._STATE_SECONDS = 0.0
    file = Path(f"{given['data_args']['file']}-{os.getpid()}")
    with next_session(session, "whole", given) as first:
        whole = trained(first, folder)
    before = file.read_text().split()
    with next_session(session, "rest", given) as again:
        again.restore(folder)
        rest = trained(again, folder)
    return whole, rest, file.read_text().split()[len(before) :].count("29")


def test_a_checkpoint_has_the_states_of_the_shards_of_all_processes(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    given = spec(third_party_streams.of_hugging_face_lengths, tmp_path / "read", 0)
    work = functools.partial(readings_of_the_last_sample, given=given, folder=tmp_path / "saved")
    results = isotrain.launch(
        work, given, backend="reference", replicas=2, output=tmp_path / "run", on_event=print
    )
    assert [rest for _, rest, _ in results] == [whole[SAVED_AFTER:] for whole, _, _ in results]
    assert [readings for _, _, readings in results] == [0, 3]  # not again in the first of 4 epochs


@pytest.mark.parametrize("case", ["litdata", "litdata, in shards", "litdata, by position"])
def test_litdata_takes_no_shard_of_a_process(case: str, tmp_path: Path) -> None:
    pytest.importorskip("litdata")
    dataset = third_party_streams.litdata_dataset(str(tmp_path / "read"))
    environment = type(dataset.distributed_env)
    dataset.distributed_env = shard = environment(world_size=2, global_rank=1, num_nodes=1)
    dataset.set_drop_last(True)  # as LitData itself does where it has found two processes
    if case == "litdata, by position":
        source: Any = isotrain.sources.MapStyle(dataset, inputs="x", targets="y")
        inputs = source.gather(np.arange(len(source)))[0]
    else:
        options = {"shards": 4} if "shards" in case else {}
        source = isotrain.sources.sample_stream(dataset, "x", "y", **options)
        inputs = np.concatenate([batch[0] for batch in source.epoch(0, batch_size=4)])
    assert len(np.unique(inputs, axis=0)) == len(source) == third_party_streams.SAMPLES
    assert dataset.distributed_env is shard


def test_mosaicml_is_refused_in_shards(tmp_path: Path) -> None:
    if importlib.util.find_spec("streaming") is None:
        pytest.skip("streaming is not installed, which `make environment` does")
    dataset = third_party_streams.mosaic_dataset(str(tmp_path / "read"))
    with pytest.raises(isotrain.IsotrainError, match="parts of a StreamingDataset of MosaicML"):
        isotrain.sources.sample_stream(dataset, "x", "y", shards=2)
