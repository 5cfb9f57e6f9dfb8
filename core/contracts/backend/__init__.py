"""The contracts of a backend: its adapter, its replica groups and replicas, and what it may have besides."""
