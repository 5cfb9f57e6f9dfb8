"""What is known of this machine and this interpreter, without any framework."""
