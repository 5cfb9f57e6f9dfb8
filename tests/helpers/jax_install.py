"""JAX, installed in a folder of its own: where it is importable, Keras imports it on every framework."""

from __future__ import annotations

import sys
from pathlib import Path

JAX = Path(sys.prefix) / "jax"

QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
"""XLA flags that turn optimisation off: the tests have many shapes and little to compute, and XLA's fusion
emitters take three times as long."""


def folder() -> Path:
    """The folder of JAX; fails where it is not installed."""
    assert JAX.is_dir(), f"{JAX} is missing: `make environment` installs JAX there"
    return JAX
