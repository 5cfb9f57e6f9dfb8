"""Processes of one host that work for another one, and the channels between them."""
