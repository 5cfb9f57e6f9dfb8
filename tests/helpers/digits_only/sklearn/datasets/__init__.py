"""The digits of scikit-learn, read from its file without importing the package."""

from __future__ import annotations

from importlib.metadata import distribution

import numpy as np

FILE = "sklearn/datasets/data/digits.csv.gz"


def load_digits(*, n_class: int = 10, return_X_y: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pixels from 0 to 16, float64 [images, 64], and labels: of the digits below `n_class`."""
    assert return_X_y, "the other form is not here"
    table = np.loadtxt(str(distribution("scikit-learn").locate_file(FILE)), delimiter=",")
    chosen = table[table[:, -1] < n_class]
    return chosen[:, :-1], chosen[:, -1].astype(np.int64)
