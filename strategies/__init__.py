"""Strategies: how replicas cooperate. They import no framework."""
