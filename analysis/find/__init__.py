"""Searches for a learning rate and for the largest global batch, by short runs."""
