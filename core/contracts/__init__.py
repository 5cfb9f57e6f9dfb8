"""What plugins fulfil and are given: adapters, replica groups, strategies, launchers, loggers, plans."""
