"""In the place of scikit-learn, of whose digits the examples learn: to import it takes a process a second."""
