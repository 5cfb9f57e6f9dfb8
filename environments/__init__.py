"""Cluster environments: rank and world size of a process, from its launcher's environment variables."""
