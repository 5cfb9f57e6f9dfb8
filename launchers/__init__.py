"""Launchers that have an engine start a run's processes: SLURM, MPI, torchrun, Ray, Kubernetes and so on."""
