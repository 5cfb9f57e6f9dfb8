"""Adapters of the Horovod backends, `horovod-torch` and `horovod-tf`."""
