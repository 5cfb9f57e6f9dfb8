"""What to train: the training spec, its parts, its files and the references in it."""
