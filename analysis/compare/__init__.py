"""Measuring backends side by side, and telling what was found."""
