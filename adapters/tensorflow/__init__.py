"""Adapters for TensorFlow: `tf-mirrored` and `tf-multiworker`."""
