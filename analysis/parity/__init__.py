"""Finds the first step and the first tensor at which two runs part, and says why."""
