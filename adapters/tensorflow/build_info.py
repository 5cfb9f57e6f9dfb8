"""Build options of the installed TensorFlow, read from its files; does not import it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def is_cuda_build() -> bool:
    """Whether the installed TensorFlow was built for NVIDIA GPUs."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        return False
    build_info = Path(spec.origin).parent / "python" / "platform" / "build_info.py"
    try:
        text = build_info.read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"""['"]is_cuda_build['"]\s*[,:]\s*True""", text) is not None
