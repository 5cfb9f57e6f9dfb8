"""Images, histograms and texts that loops log: files by step, and what loggers make of them."""

from __future__ import annotations

import base64
import functools
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.html_page import Page
from helpers.isolated import run_isolated
from integration.session_specs import launch, spec
from plugins.test_loggers import WITH_TENSORFLOW

import isotrain
from isotrain.analysis.run_report.html import write_report

pytestmark = pytest.mark.usefixtures("reference")

IMAGE = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
VALUES = np.array([0.0, 0.25, 0.5, 1.0, 1.0, np.nan])


def logging(session: isotrain.Session) -> None:
    for batch in session.batches():
        session.step(batch)
        if batch.step == 1:
            session.log_image("samples/first", IMAGE)
            session.log_histogram("first/kernel", VALUES, bins=2)
            session.log_text("sentence", "Grüße", step=0)


def test_files_are_by_name_and_step(tmp_path: Path) -> None:
    launch(logging, tmp_path, 2)
    media = tmp_path / "run" / "media"
    files = {str(each.relative_to(media)) for each in media.rglob("*.*")}
    assert files == {
        "samples/first/step-000000001.png",
        "first/kernel/step-000000001.json",
        "sentence/step-000000000.txt",
    }
    np.testing.assert_array_equal(pixels(media / "samples/first/step-000000001.png"), IMAGE)
    assert json.loads((media / "first/kernel/step-000000001.json").read_text()) == {
        "counts": [2, 3],
        "edges": [0.0, 0.5, 1.0],
        "sum": 2.75,
        "sum_of_squares": 2.3125,
        "not_finite": 1,
    }
    assert (media / "sentence/step-000000000.txt").read_text() == "Grüße"


def test_the_page_shows_the_newest_of_each_name(tmp_path: Path) -> None:
    launch(logging, tmp_path, 2)
    path, _ = write_report(tmp_path / "run")
    page = Page(path.read_text(encoding="utf-8"))
    (image,) = page.of("img")
    assert image["alt"] == "samples/first"
    content = base64.b64decode(str(image["src"]).removeprefix("data:image/png;base64,"))
    assert content == (tmp_path / "run/media/samples/first/step-000000001.png").read_bytes()
    assert [each["height"] for each in page.of("rect") if each.get("width") == "50.0"] == [
        "66.667",
        "100.0",
    ]
    assert "Grüße" in page.text
    assert "from 0 to 1 first/kernel: step 1, the newest of 1 file" in page.text


def test_a_page_has_no_large_images_and_the_newest_step(tmp_path: Path) -> None:
    def work(session: isotrain.Session) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3)).astype(np.uint8)
        for batch in session.batches():
            session.step(batch)
            session.log_text("words", f"of step {batch.step}")
        session.log_image("noise", noise)

    launch(work, tmp_path, 1, epochs=1)
    path, _ = write_report(tmp_path / "run")
    page = Page(path.read_text(encoding="utf-8"))
    assert not page.of("img")
    assert "The image is in media/noise/step-000000002.png." in page.text
    assert "of step 2 words: step 2, the newest of 3 files" in page.text
    assert "of step 1" not in page.text.split("Events")[0]


def test_the_page_says_what_it_leaves_out_and_shows_each_kind_of_a_name(tmp_path: Path) -> None:
    def work(session: isotrain.Session) -> None:
        for number in range(13):
            session.log_text(f"layer-{number}", "said by a layer", step=0)
            session.log_image(f"layer-{number}", IMAGE, step=0)

    launch(work, tmp_path, 1, epochs=1)
    path, _ = write_report(tmp_path / "run")
    page = Page(path.read_text(encoding="utf-8"))
    assert [each["alt"] for each in page.of("img")] == [f"layer-{n}" for n in range(12)]
    assert page.text.count("said by a layer") == 12
    assert "The page shows the first 24; 2 more are only there." in page.text


def pixels(path: Path) -> np.ndarray:
    """Pixels of a PNG file whose rows are not filtered."""
    content, position, data = path.read_bytes(), 8, b""
    width, height = struct.unpack(">II", content[16:24])
    while position < len(content):
        length = struct.unpack(">I", content[position : position + 4])[0]
        chunk = content[position + 4 : position + 8 + length]
        assert struct.unpack(">I", content[position + 8 + length :][:4])[0] == zlib.crc32(chunk)
        data += chunk[4:] if chunk.startswith(b"IDAT") else b""
        position += length + 12
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, -1)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("log_image", ("a", np.zeros(3)), r"shape \[height, width\], .* received \[3\]"),
        ("log_image", ("a", np.full((2, 2), 1.5)), "floats from 0 to 1, received float64"),
        ("log_image", ("a", np.zeros((2, 2), np.int64)), "uint8, or floats .* received int64"),
        ("log_histogram", ("a", [np.nan]), "received 0 finite values"),
        ("log_text", ("../a", ""), "expected a name of letters"),
        ("log_text", ("a", "", 7), "expected a step from 0"),
    ],
)
def test_what_cannot_be_logged_is_refused(method: str, arguments: Any, message: str) -> None:
    with (
        isotrain.open_session(spec(), backend="reference") as session,
        pytest.raises(isotrain.IsotrainError, match=message),
    ):
        getattr(session, method)(*arguments)


def read_board(session: isotrain.Session, folder: str) -> dict[str, Any]:
    import tensorflow as tf

    (file,) = tf.io.gfile.glob(f"{folder}/*")
    events = tf.compat.v1.train.summary_iterator(file)
    values = {v.tag: (event.step, v) for event in events for v in event.summary.value}
    image = values["samples/first"][1].image
    histogram = values["first/kernel"][1].histo
    text = values["sentence"][1]
    return {
        "steps": [values[tag][0] for tag in ("samples/first", "first/kernel", "sentence")],
        "sizes": [image.height, image.width, image.colorspace],
        "pixels": tf.io.decode_png(image.encoded_image_string).numpy(),
        "histogram": [
            *(histogram.min, histogram.max, histogram.num, histogram.sum, histogram.sum_squares),
            list(histogram.bucket_limit),
            list(histogram.bucket),
        ],
        "text": [
            text.metadata.plugin_data.plugin_name,
            *(each.decode() for each in tf.make_ndarray(text.tensor)),
        ],
    }


@pytest.mark.features
def test_tensorboard_has_all_three(tmp_path: Path) -> None:
    launch(logging, tmp_path, loggers=["tensorboard"])
    read = functools.partial(read_board, folder=str(tmp_path / "run" / "tensorboard"))
    found = run_isolated(read, WITH_TENSORFLOW, "tf-mirrored", tmp_path / "read")
    np.testing.assert_array_equal(found.pop("pixels"), IMAGE)
    assert found == {
        "steps": [1, 1, 0],
        "sizes": [2, 4, 3],
        "histogram": [0.0, 1.0, 5.0, 2.75, 2.3125, [0.5, 1.0], [2.0, 3.0]],
        "text": ["text", "Grüße"],
    }


@pytest.mark.features
@pytest.mark.filterwarnings("default")  # MLflow's own use of SQLAlchemy warns
def test_mlflow_has_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    logger = {"name": "mlflow", "options": {"experiment": "media", "tracking_uri": store}}
    launch(logging, tmp_path, loggers=[logger])
    from mlflow import MlflowClient

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("media")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    (file,) = client.list_artifacts(found.info.run_id, "media/samples/first")
    assert file.path == "media/samples/first/step-000000001.png"


WANDB = """\
import sys
from pathlib import Path
from isotrain.core.loggers.wandb import WandbLogger
logger = WandbLogger("isotrain", mode="offline")
folder = Path(sys.argv[1])
logger.started({"run": "media"}, folder)
for kind, file in (("image", "samples/first/step-000000001.png"),
                   ("histogram", "first/kernel/step-000000001.json"),
                   ("text", "sentence/step-000000000.txt")):
    logger.media_logged(1, kind, kind, folder / "media" / file)
logger.finished(None)
"""


@pytest.mark.features
def test_wandb_has_all_three(tmp_path: Path) -> None:
    launch(logging, tmp_path)
    run = tmp_path / "run"
    subprocess.run([sys.executable, "-c", WANDB, str(run)], check=True, cwd=tmp_path)
    kinds = {each.parent.name for each in run.glob("wandb/offline-run-*/files/media/*/*")}
    assert kinds == {"images", "html"}  # a histogram is in the history itself
