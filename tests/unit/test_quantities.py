import pytest

from isotrain.core.quantities import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "step", "0 steps"),
        (1, "replica", "1 replica"),
        (2, "epoch", "2 epochs"),
        (2, "process", "2 processes"),
        (2, "micro-batch", "2 micro-batches"),
        (1200, "sample", "1,200 samples"),
    ],
)
def test_counted(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text
