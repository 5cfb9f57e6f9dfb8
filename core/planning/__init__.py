"""Resolves a spec into a plan; lists what is registered, and diagnoses what works on this machine."""
