"""Rendezvous of ranks that a scheduler or launcher has started, and rank 0's supervision of them."""
