"""The programs of the contenders, each one run."""
