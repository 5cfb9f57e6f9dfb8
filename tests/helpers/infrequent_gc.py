"""Preloaded by the fork servers of tests, so that ranks collect cyclic garbage more rarely.

Runs are short, and tracing a model makes many objects: collecting takes a tenth of the time of a run under
TensorFlow.
"""

from __future__ import annotations

import gc

gc.set_threshold(50_000, 20, 100)
