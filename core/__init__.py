"""The framework-neutral part of isotrain: it imports no framework."""
