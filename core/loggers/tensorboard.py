"""The logger `tensorboard`: scalars, images, histograms and texts in a TensorBoard event file.

The file is a sequence of TFRecords, each a protocol buffer `Event`
(tensorflow/core/util/event.proto), of which scalars need six fields and media some more. They are encoded
here because the packages that could do it import a framework where one is installed, and this process
imports none.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isotrain.core.contracts.logger import Logger, MediaKind

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types of protocol buffers
_CASTAGNOLI = 0x82F63B78


class TensorBoardLogger(Logger):
    """Writes an event file with losses, learning rates and metrics by step."""

    name = "tensorboard"
    summary = "scalars and media for TensorBoard, in the folder tensorboard of the run directory"

    def __init__(self, folder: str | None = None) -> None:
        """Selects the folder of the event file; None for `tensorboard` in the run directory."""
        self._folder = folder

    def started(self, plan: Mapping[str, Any], run_directory: Path) -> None:
        folder = Path(self._folder) if self._folder else run_directory / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now)}.{socket.gethostname()}.{os.getpid()}"
        self._file = folder / f"{name}.{plan['run']}"
        self._write([_field(1, now) + _field(3, b"brain.Event:2")])

    def resumed(self, step: int) -> None:
        """Has TensorBoard drop later steps, by a `SessionLog` that starts here."""
        start = _field(7, _field(1, 1))
        self._write([_field(1, time.time()) + _field(2, step + 1) + start])

    def steps_done(
        self, first_step: int, losses: Sequence[float], learning_rates: Sequence[float]
    ) -> None:
        pairs = enumerate(zip(losses, learning_rates, strict=True), first_step)
        self._write(
            _event(step, {"loss": loss, "learning_rate": rate}) for step, (loss, rate) in pairs
        )

    def scalars_logged(self, records: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        self._write(_event(step, scalars) for step, scalars in records)

    def media_logged(self, step: int, name: str, kind: MediaKind, path: Path) -> None:
        value = _field(1, name.encode()) + _MEDIA[kind](path.read_bytes())
        self._write([_summary_event(step, _field(1, value))])

    def epoch_ended(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        tagged = {f"epoch/{name}": value for name, value in metrics.items()}
        self._write([_event(step, {"epoch": epoch, **tagged})])

    def _write(self, events: Iterable[bytes]) -> None:
        with self._file.open("ab") as stream:
            stream.writelines(_record(event) for event in events)


def _event(step: int, scalars: Mapping[str, float]) -> bytes:
    """An `Event` with a `Summary` that has a `Value` (tag, simple value) for each scalar."""
    summary = b"".join(
        _field(1, _field(1, tag.encode()) + _field(2, struct.pack("<f", value), _FLOAT))
        for tag, value in scalars.items()
    )
    return _summary_event(step, summary)


def _summary_event(step: int, summary: bytes) -> bytes:
    """An `Event`: wall time, step and encoded `Summary`."""
    return _field(1, time.time()) + _field(2, step) + _field(5, summary)


def _image(content: bytes) -> bytes:
    """Fields of a `Value` with an `Image`: height, width and channels from the PNG's header, and the file."""
    width, height, _, color_type = struct.unpack(">IIBB", content[16:26])
    channels = {0: 1, 2: 3, 6: 4}[color_type]
    sizes = b"".join(map(_field, (1, 2, 3), (height, width, channels)))
    return _field(4, sizes + _field(4, content))


def _histogram(content: bytes) -> bytes:
    """Fields of a `Value` with a `HistogramProto`, of the JSON of `session.log_histogram`."""
    page = json.loads(content)
    edges, counts = page["edges"], page["counts"]
    numbers = edges[0], edges[-1], float(sum(counts)), page["sum"], page["sum_of_squares"]
    facts = b"".join(_field(number, float(value)) for number, value in enumerate(numbers, 1))
    limits, buckets = (struct.pack(f"<{len(counts)}d", *each) for each in (edges[1:], counts))
    return _field(5, facts + _field(6, limits) + _field(7, buckets))


def _text(content: bytes) -> bytes:
    """Fields of a `Value` with a string tensor of shape [1], and the name of TensorBoard's plugin for it."""
    shape, plugin = _field(2, _field(1, 1)), _field(1, _field(1, b"text"))
    tensor = _field(1, 7) + _field(2, shape) + _field(8, content)  # 7: strings
    return _field(8, tensor) + _field(9, plugin)


_MEDIA: dict[MediaKind, Callable[[bytes], bytes]] = {
    "image": _image,
    "histogram": _histogram,
    "text": _text,
}


def _field(number: int, value: float | bytes, kind: int | None = None) -> bytes:
    """Encodes a field: an int as varint, a float as double, bytes with their length before them."""
    if kind == _FLOAT:
        assert isinstance(value, bytes)
        return _varint(number << 3 | _FLOAT) + value
    if isinstance(value, bytes):
        return _varint(number << 3 | _BYTES) + _varint(len(value)) + value
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    return _varint(number << 3 | _DOUBLE) + struct.pack("<d", value)


def _varint(value: int) -> bytes:
    """Encodes a varint: seven bits per byte, the lowest first; the eighth is set if more follow."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _record(data: bytes) -> bytes:
    """A TFRecord: the length, its checksum, the data, their checksum."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C (Castagnoli), masked as in TFRecord files."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _table() -> list[int]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (_CASTAGNOLI if entry & 1 else 0)
        entries.append(entry)
    return entries


_TABLE = _table()
