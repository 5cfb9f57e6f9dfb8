"""Checkpoints on disk or in a bucket: written whole or not at all, and checked when they are read."""
