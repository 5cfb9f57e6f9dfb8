"""Worker processes that load samples by position."""
