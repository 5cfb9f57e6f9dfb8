"""The torch adapters."""
