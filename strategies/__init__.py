"""Built-in strategies: how replicas cooperate. They import no framework."""
