"""Where people's own streams are, in their own words, and how these are kept in a checkpoint."""

from __future__ import annotations

import base64
import contextlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isotrain.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np  # imported below where it is needed: plans, which start sooner without it, need none

_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""How loaders of torch, and Grain's iterators, tell where they are and are taken there."""


@dataclass(frozen=True)
class StreamState:
    """A place between two batches of an epoch of a stream, to which it can be taken back.

    Attributes:
        epoch: From 0.
        given: Samples of the epoch before it, above 0.
        state: What the stream says of it, as `to_json` gives it.
        next_sample: A checksum of the sample that comes next.
    """

    epoch: int
    given: int
    state: Any
    next_sample: int


class StreamStateHandler:
    """What knows where a stream is: the loader itself or its iterator."""

    def __init__(self, owner: Any, tell: str, take_back: str) -> None:
        self._tell = getattr(owner, tell)
        self._take_back = getattr(owner, take_back)

    @classmethod
    def of(cls, owner: Any) -> StreamStateHandler | None:
        """The one that `owner` is; None where it has not both methods."""
        for names in _METHODS:
            if all(callable(getattr(owner, name, None)) for name in names):
                return cls(owner, *names)
        return None

    def state(self) -> Any:
        """Where the stream is, as JSON values.

        Raises:
            DataError: It says so in what no checkpoint can hold.
        """
        return to_json(self._tell())

    def load(self, state: Any) -> None:
        """Takes the stream to where it was."""
        self._take_back(from_json(state))


def to_json(value: Any) -> Any:
    """A state as JSON values, from which `from_json` makes it again.

    Args:
        value: Numbers, texts, bytes, arrays and tensors; lists, tuples and dicts of these.

    Raises:
        DataError: It is something else.
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
    """An array or tensor as an array of numbers.

    Raises:
        DataError: It is none.
    """
    import numpy as np

    with contextlib.suppress(
        TypeError, ValueError, RuntimeError
    ):  # tensors of other devices and types
        array = np.asarray(value)
        if hasattr(value, "__array__") and not array.dtype.hasobject:
            return array
    raise DataError(
        f"data: the stream's own state has a {type(value).__name__}, which no checkpoint can hold"
        " (numbers, texts, bytes, arrays, and lists and dicts of these it can): a run that resumes reads"
        " the stream again, to where it was."
    )


def from_json(value: Any) -> Any:
    """The state from which `to_json` made JSON values.

    Raises:
        DataError: It made no such values.
    """
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        return _MAKERS[kind](content)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the checkpoint's state of the stream is not as isotrain wrote it: {value!r:.60}"
        ) from error


def _array_from_json(fields: Any) -> Any:
    """An array, as a tensor of the package that it came from where that is imported."""
    import numpy as np

    flat = np.frombuffer(base64.b64decode(fields["bytes"]), np.dtype(fields["dtype"]))
    array = flat.reshape(fields["shape"]).copy()
    return getattr(sys.modules.get(fields["of"]), "asarray", np.asarray)(array)


_MAKERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": base64.b64decode,
    "dict": lambda pairs: {from_json(key): from_json(part) for key, part in pairs},
    "tuple": lambda parts: tuple(map(from_json, parts)),
    "array": _array_from_json,
}
