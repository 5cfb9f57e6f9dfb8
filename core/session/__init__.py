"""The session of a process: training steps, evaluation, checkpoints and weights."""
