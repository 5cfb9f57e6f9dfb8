"""Checkpoints on disk or in object storage: committed atomically by a manifest, verified by checksums."""
