"""How things are shown to people: tables, texts, progress, pieces of HTML."""
