"""Starting the processes of a run on this machine, watching them, and ending them."""
