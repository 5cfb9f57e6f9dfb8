"""Orders: which samples each global batch of an epoch has, as a pure function."""
