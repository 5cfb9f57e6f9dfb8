"""The reader of a host: a process that reads streams once for all processes of a run there."""
