"""Finding plugins, checking them, and what they registered."""
