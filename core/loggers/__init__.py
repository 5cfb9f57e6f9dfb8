"""The loggers that come with isotrain, one file each."""
