"""Operating system helpers (files, processes, hardware, interpreter), without any framework."""
