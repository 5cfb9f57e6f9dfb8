"""The contracts: what plugins implement and receive (adapters, groups, strategies, launchers, loggers)."""
