"""One training program per way of training, each written as its own documentation shows."""
