"""Generation within a loop: the same tokens on every process and backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import cells, load

import isotrain

EXAMPLE = "generate"


@pytest.mark.examples
@cells(EXAMPLE)
def test_counts_on_every_process(backend: str, replicas: int, tmp_path: Path) -> None:
    example = load(EXAMPLE)
    generated = isotrain.launch(
        example.train,
        example.spec.replace(threads=1),
        backend=backend,
        replicas=replicas,
        output=tmp_path / "run",
        on_event=lambda event: None,
    )
    assert all(tokens == [3, 4, 5, 6, 7, 8, 9, 0] for tokens in generated)
