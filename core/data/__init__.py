"""Data: from user data to global batches in a fixed order."""
