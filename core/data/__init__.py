"""From a person's data to global batches in a fixed order."""
