"""Launchers that use other tools: SLURM, MPI, torchrun, horovodrun, Ray, Kubernetes."""
