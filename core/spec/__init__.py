"""The training spec: its sections, file formats, validation and import strings."""
