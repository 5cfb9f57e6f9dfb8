"""Streams of batches: reading, cutting to global batches, and their state in checkpoints."""
