"""Start of `isotrain trace` inside a program."""
