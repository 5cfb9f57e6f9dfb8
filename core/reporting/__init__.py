"""Output for users: text, tables, progress displays and HTML."""
