"""Worker processes that load samples, and the memory that they share with the process of the model."""
