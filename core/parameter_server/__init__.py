"""Parameter-server runs: the coordinator holds the parameters, and workers compute gradients."""
