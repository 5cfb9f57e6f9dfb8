"""Served runs: one process holds the parameters and hands out work, others compute gradients."""
