"""Environments: who a process is, by the engine that started it. Each is a pure function of variables."""
