"""Says before anything starts what will make results differ between backends or replica counts."""
