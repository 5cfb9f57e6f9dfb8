"""Adapters: the only code that imports a framework."""
