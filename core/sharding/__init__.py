"""Sharded runs (ZeRO): each replica updates a shard of the weights, and has optimizer state for it alone."""
