"""PowerSGD by torch's communication hook, whose all-reduces need the same order on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from integration import step_memory

import isotrain
from isotrain.testing.launching import try_run

pytestmark = pytest.mark.slow

BUCKET_OF_EACH_TENSOR = {"bucket_cap_mb": 1e-6}


def losses(session: isotrain.Session) -> list[float]:
    return [float(session.step(batch)) for batch in session.batches()]


@pytest.mark.features
@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (2, BUCKET_OF_EACH_TENSOR),
        (3, BUCKET_OF_EACH_TENSOR),
        (2, {"find_unused_parameters": True, "bucket_cap_mb": 100}),
    ],
    ids=["2-replicas", "3-replicas", "unused-weights"],
)
def test_buckets_are_compressed_in_order(replicas: int, options: dict[str, Any]) -> None:
    spec = {
        **step_memory.SPECS["dense"],
        "strategy": {"name": "compressed", "options": {"method": "powersgd", "start": 2}},
        "backend_options": {"torch-ddp": options},
        "epochs": 8,
        "timeouts": {"progress": 20},
    }
    run = try_run(losses, spec, "torch-ddp:gloo", replicas)
    assert run.failure is None, run.failure
    first, *others = run.returned
    assert others == [first] * (replicas - 1)
    assert len(first) == 32
    assert sum(first[-4:]) < sum(first[:4])
