"""Images, histograms and texts of custom loops and callbacks: files in the run directory."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core.contracts.events import MediaLogged
from isotrain.core.contracts.reporter import Reporter
from isotrain.core.data.arrays import as_array
from isotrain.core.errors import IsotrainError
from isotrain.core.json_format import json_page
from isotrain.core.session.training.session_log import SessionLog
from isotrain.core.system.files import atomic_write

FOLDER = "media"
"""Folder in the run directory, with a folder for each name."""
_NAME = re.compile(r"[\w-]+(/[\w-]+)*")
_COLOR_TYPES = {1: 0, 3: 2, 4: 6}
"""Color type of PNG files, by number of channels: gray, RGB, RGB with opacity."""


class MediaLog:
    """Writes what is logged on rank 0, and reports the files. Local."""

    def __init__(self, log: SessionLog, reporter: Reporter, run_directory: Path) -> None:
        self._log = log
        self._reporter = reporter
        self._folder = run_directory / FOLDER

    def image(self, name: str, image: Any, step: int | None) -> None:
        """Writes an image as PNG, as `Session.log_image`."""
        array = as_array(image, f"log_image: {name!r}")
        pixels = array[..., None] if array.ndim == 2 else array
        if pixels.ndim != 3 or pixels.shape[-1] not in _COLOR_TYPES or not pixels.size:
            raise IsotrainError(
                f"log_image: {name!r}: expected shape [height, width], or with 1, 3 or 4 channels as its last"
                f" dimension, received {[*array.shape]}."
            )
        if pixels.dtype != np.uint8:
            if pixels.dtype.kind != "f" or not (pixels.min() >= 0 and pixels.max() <= 1):
                raise IsotrainError(
                    f"log_image: {name!r}: expected dtype uint8, or floats from 0 to 1, received"
                    f" {pixels.dtype} from {pixels.min()} to {pixels.max()}."
                )
            pixels = np.rint(pixels * 255).astype(np.uint8)
        self._write("log_image", name, "image", ".png", _png(pixels), step)

    def histogram(self, name: str, values: Any, bins: int, step: int | None) -> None:
        """Writes the counts of values in bins as JSON, as `Session.log_histogram`."""
        array = as_array(values, f"log_histogram: {name!r}").astype(np.float64).ravel()
        finite = array[np.isfinite(array)]
        if not finite.size or bins < 1:
            raise IsotrainError(
                f"log_histogram: {name!r}: expected finite values and at least one bin, received"
                f" {finite.size} finite values and {bins} bins."
            )
        counts, edges = np.histogram(finite, bins)
        page = {
            "counts": counts.tolist(),
            "edges": edges.tolist(),
            "sum": float(finite.sum()),
            "sum_of_squares": float((finite**2).sum()),
            "not_finite": array.size - finite.size,
        }
        self._write("log_histogram", name, "histogram", ".json", json_page(page).encode(), step)

    def text(self, name: str, text: str, step: int | None) -> None:
        """Writes a text, as `Session.log_text`."""
        self._write("log_text", name, "text", ".txt", text.encode(), step)

    def _write(
        self, call: str, name: str, media: str, suffix: str, content: bytes, step: int | None
    ) -> None:
        step = self._log.step(call, step)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise IsotrainError(
                f"{call}: expected a name of letters, digits, - and _, in parts divided by /, received"
                f" {name!r}."
            )
        if self._log.is_silent:
            return
        path = self._folder / name / f"step-{step:09}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content)
        file = str(path.relative_to(self._folder.parent))
        self._reporter.emit(MediaLogged(logged_step=step, name=name, media=media, file=file))


def _png(pixels: np.ndarray) -> bytes:
    """PNG file (RFC 2083) of an image, uint8 of shape `[height, width, channels]`."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    rows = np.concatenate(
        [np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1
    )  # a 0 before each row: not filtered
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(rows.tobytes()), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )
