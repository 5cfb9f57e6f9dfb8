"""Causes of a difference between two programs, by what they concern."""
