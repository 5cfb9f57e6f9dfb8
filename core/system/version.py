"""Which isotrain this is."""

VERSION = "0.1.0"
