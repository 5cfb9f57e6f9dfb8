"""Starts, supervises and ends the processes of a run, on this machine or through a scheduler."""
