"""Horovod's build for the frameworks that are installed: `python -m isotrain.build_horovod`."""
