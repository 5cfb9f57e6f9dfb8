"""Programs that measure isotrain against loops written by hand."""
