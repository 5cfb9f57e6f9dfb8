"""States of user-defined streams (`state_dict` or `get_state`), and their encoding as JSON in checkpoints."""

from __future__ import annotations

import base64
import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isotrain.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np  # imported late below: plans do not need it, and start sooner without

_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""Methods that read and load the state of torch's stateful loaders, and of Grain's iterators."""


@dataclass(frozen=True)
class StreamState:
    """The position of a stream between two batches of an epoch, to which it can return.

    Attributes:
        epoch: Index of the epoch, from 0.
        samples_read: Number of samples of the epoch before this position, above 0.
        state: The stream's state, as JSON values by `to_json`.
        next_sample: Fingerprint of the sample that comes next.
    """

    epoch: int
    samples_read: int
    state: Any
    next_sample: int


class StreamStateHandler:
    """Reads and loads the state of a stateful loader or iterator."""

    def __init__(self, owner: Any, read_method: str, load_method: str) -> None:
        self._read = getattr(owner, read_method)
        self._load = getattr(owner, load_method)

    @classmethod
    def of(cls, owner: Any) -> StreamStateHandler | None:
        """The handler of a loader or iterator; None if it does not have both methods."""
        for names in _METHODS:
            if all(callable(getattr(owner, name, None)) for name in names):
                return cls(owner, *names)
        return None

    def state(self) -> Any:
        """The stream's state, as JSON values; None if it has none from which it continues exactly.

        Raises:
            DataError: It has values that no checkpoint can hold.
        """
        return to_json(self._read())

    def load(self, state: Any) -> None:
        """Returns the stream to a state, given as JSON values; None leaves it as it is."""
        if state is not None:
            self._load(from_json(state))


def opened(source: Iterable[Any], state: Any) -> tuple[Iterator[Any], StreamStateHandler | None]:
    """Starts a reading of a loader; returns its iterator, and the handler of its state if it has one.

    Args:
        source: A loader.
        state: State to return to, as JSON values; None for the start.
    """
    handler = StreamStateHandler.of(source)
    if handler is not None:
        handler.load(state)
        return iter(source), handler
    items = iter(source)
    handler = StreamStateHandler.of(items)
    if handler is not None:
        handler.load(state)
    return items, handler


def to_json(value: Any) -> Any:
    """Encodes a state as JSON values, which `from_json` decodes.

    Args:
        value: Numbers, texts, bytes, arrays and tensors of any shape; lists, tuples and dicts of these.

    Raises:
        DataError: The value is something else.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {"dict": [[to_json(key), to_json(part)] for key, part in value.items()]}
    if isinstance(value, list):
        return [to_json(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [to_json(part) for part in value]}
    return {"array": _array_to_json(value)}


def _array_to_json(value: Any) -> dict[str, Any]:
    array = _array(value)
    return {
        "of": type(value).__module__.partition(".")[0],
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "bytes": base64.b64encode(array.tobytes()).decode(),
    }


def _array(value: Any) -> np.ndarray:
    """Converts an array or tensor of any shape to a NumPy array of numbers.

    Raises:
        DataError: The value is neither.
    """
    import numpy as np

    with contextlib.suppress(
        TypeError, ValueError, RuntimeError
    ):  # tensors of other devices and types
        array = np.asarray(value)
        if hasattr(value, "__array__") and not array.dtype.hasobject:
            return array
    raise DataError(
        f"data: the stream's state has a {type(value).__name__}, which no checkpoint can hold (expected"
        " numbers, texts, bytes, arrays, and lists and dicts of these): a run that resumes reads the epoch"
        " again up to where it was."
    )


def from_json(value: Any) -> Any:
    """Decodes a state that `to_json` encoded.

    Raises:
        DataError: The values are not by `to_json`.
    """
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        return _DECODERS[kind](content)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the checkpoint's state of the stream was not written by isotrain: {value!r:.60}"
        ) from error


def _array_from_json(fields: Any) -> Any:
    """Decodes an array; as a tensor of the package that it came from, if that is imported."""
    import numpy as np

    flat = np.frombuffer(base64.b64decode(fields["bytes"]), np.dtype(fields["dtype"]))
    array = flat.reshape(fields["shape"]).copy()
    return getattr(sys.modules.get(fields["of"]), "asarray", np.asarray)(array)


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "dict": lambda pairs: {from_json(key): from_json(part) for key, part in pairs},
    "tuple": lambda parts: tuple(map(from_json, parts)),
    "array": _array_from_json,
}
