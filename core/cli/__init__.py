"""The command line: parser, commands, and their output."""
