"""Runs whose processes an engine has started, each of which takes its place by itself."""
