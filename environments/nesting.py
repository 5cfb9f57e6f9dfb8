"""Which engines others often run inside of; an environment's `nested_in` is made of these."""

from __future__ import annotations

PROTOCOLS = frozenset({"pmi"})
"""What is no engine but spoken by several, each of which says more by variables of its own."""
SCHEDULERS = PROTOCOLS | {"slurm", "lsf", "pbs", "pals", "flux", "kubernetes", "sagemaker"}
"""In whose jobs other engines are started."""
STARTERS = SCHEDULERS | {"openmpi", "mpich", "ray"}
"""What may start another engine on each host, or a script that sets variables as another engine does."""
