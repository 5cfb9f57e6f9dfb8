"""Models that are cut into stages: in which order these compute, and where to cut. Imports no framework."""
