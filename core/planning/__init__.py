"""From a spec to a plan; what there is, and what works on this machine."""
