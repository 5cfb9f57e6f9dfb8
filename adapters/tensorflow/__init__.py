"""The tensorflow adapters."""
