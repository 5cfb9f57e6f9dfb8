"""What a process of a run does: its session, the loop, and what the run leaves behind."""
