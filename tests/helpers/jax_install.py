"""JAX, which has a folder of its own: where it can be imported, Keras imports it on every framework."""

from __future__ import annotations

import sys
from pathlib import Path

JAX = Path(sys.prefix) / "jax"

QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)
"""Optimises nothing. There are many shapes, and little to compute: what XLA's own emitters make takes three
times as long."""


def folder() -> Path:
    """Where it is; a fault where it is not installed."""
    assert JAX.is_dir(), f"{JAX} is missing: `make environment` installs JAX there"
    return JAX
