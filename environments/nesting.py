"""Sets of schedulers and launchers in which others often run, for the `nested_in` of an environment."""

from __future__ import annotations

PROTOCOLS = frozenset({"pmi"})
"""Protocols of several launchers, which set more variables of their own."""
SCHEDULERS = PROTOCOLS | {"slurm", "lsf", "pbs", "pals", "flux", "kubernetes", "sagemaker"}
"""Schedulers, in whose jobs launchers are started."""
OUTER_LAUNCHERS = SCHEDULERS | {"openmpi", "mpich", "ray"}
"""Schedulers and launchers that may start another launcher, or a script with the variables of another."""
