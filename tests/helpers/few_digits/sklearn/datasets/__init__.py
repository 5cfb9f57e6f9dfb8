"""Digits for two full global batches of the examples and one to evaluate, for which frameworks trace once."""

from __future__ import annotations

from importlib.metadata import distribution

import numpy as np

FILE = "sklearn/datasets/data/digits.csv.gz"
COUNT = 154


def load_digits(*, return_X_y: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pixels from 0 to 16, float64 [images, 64], and labels."""
    assert return_X_y, "the other form is not here"
    file = str(distribution("scikit-learn").locate_file(FILE))
    table = np.loadtxt(file, delimiter=",", max_rows=COUNT)
    return table[:, :-1], table[:, -1].astype(np.int64)
