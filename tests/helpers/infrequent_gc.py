"""Imported by templates of tests, so that processes of their runs look for cyclic garbage more rarely.

They are short, and tracing a model makes so many objects that to go through them again and again takes a
tenth of the time of a run under TensorFlow.
"""

from __future__ import annotations

import gc

gc.set_threshold(50_000, 20, 100)
