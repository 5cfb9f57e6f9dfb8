"""Which engines others often run inside of; an environment's `inside` is made of these."""

from __future__ import annotations

SPOKEN = frozenset({"pmi"})
"""What is no engine but spoken by several, each of which says more by variables of its own."""
SCHEDULERS = SPOKEN | {"slurm", "lsf", "pbs", "pals", "flux", "kubernetes", "sagemaker"}
"""In whose jobs other engines are started."""
STARTERS = SCHEDULERS | {"openmpi", "mpich", "ray"}
"""What may start another engine on each host, or a script that sets variables as another engine does."""
