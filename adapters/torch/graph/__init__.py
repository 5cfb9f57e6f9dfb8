"""Capture of a portable (Keras) model's steps as fx graphs of torch operations, and replay; see README.md."""
