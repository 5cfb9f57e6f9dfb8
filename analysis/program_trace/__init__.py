"""Traces of programs that are not isotrain's, and where two of them part."""
