"""The horovod adapters."""
