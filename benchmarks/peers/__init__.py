"""isotrain beside the programs that people would run instead: `python -m benchmarks.peers`."""
