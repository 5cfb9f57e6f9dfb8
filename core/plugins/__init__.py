"""Plugins: discovery, validation, registries and the plugin manager."""
