"""ShardedLayout runs: each replica updates a part of the weights, and keeps optimizer slots for that part alone."""
