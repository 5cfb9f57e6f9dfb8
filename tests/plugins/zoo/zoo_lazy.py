"""What the sound plugin names by reference: imported where it is used, and not before."""

import os
import sys

if "ZOO_LAZY" not in os.environ:
    print("zoo_lazy was imported", file=sys.stderr)


def line():
    """One number out of two."""
    from isotrain.testing.reference.layers import Dense
    from isotrain.testing.reference.network import Network

    return Network([Dense(2, 1)])
