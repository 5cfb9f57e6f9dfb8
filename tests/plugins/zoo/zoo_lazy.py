"""What the sound plugin names by reference: imported where it is used, and not before."""

import os
import sys

if "ZOO_LAZY" not in os.environ:
    print("zoo_lazy was imported", file=sys.stderr)


def line():
    """One number out of two."""
    import keras

    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
