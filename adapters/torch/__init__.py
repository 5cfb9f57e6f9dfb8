"""Adapter of the torch backend, `torch-ddp`, and torch code that `horovod-torch` shares."""
