"""Rows as a pandas data frame, where pandas is; isotrain does not install it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.core.errors import IsotrainError


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The rows as a `pandas.DataFrame`.

    Raises:
        IsotrainError: pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise IsotrainError(
            f"to_pandas needs pandas, which cannot be imported ({error}). Install it (pip install"
            " pandas), or use to_dict() or to_json()."
        ) from None
    return pandas.DataFrame(rows)
