"""The built-in loggers, one file each, and the dispatcher of events to loggers and hooks."""
