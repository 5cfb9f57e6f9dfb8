"""The parts of Keras that it does not document and isotrain uses; nothing else touches such parts.

Imported by adapters only after `keras_backend.claim`.
"""

from __future__ import annotations

from isotrain.adapters.keras_private import (
    calls,
    drawing,
    graphs,
    layers,
    losses,
    masks,
    optimizers,
    other_frameworks,
    promotion,
    trainable,
)
from isotrain.adapters.keras_private.calls import (
    as_read,
    is_stateless,
    is_training,
    layer_of_error,
    surroundings,
    uncast,
)
from isotrain.adapters.keras_private.drawing import (
    draw_unseeded_by,
    initial_draws,
    is_seed,
    moved_seeds,
    seeded_generators,
)
from isotrain.adapters.keras_private.graphs import is_functional, nodes_of, standardised_inputs
from isotrain.adapters.keras_private.layers import (
    add_losses,
    assignments,
    disown_losses,
    draws_random_numbers,
    hooks_of,
    layers_of,
    moved_by,
    parts_of,
    register_weights,
)
from isotrain.adapters.keras_private.losses import (
    axis_of_classes,
    counting_losses,
    is_built,
    plain_losses,
    reduced,
    top_k_of_all_floats,
)
from isotrain.adapters.keras_private.masks import mask_of, set_mask
from isotrain.adapters.keras_private.optimizers import apply_as_given, slots_of, take_rate
from isotrain.adapters.keras_private.other_frameworks import without_tensorflow
from isotrain.adapters.keras_private.promotion import keep_64_bits
from isotrain.adapters.keras_private.trainable import unwatch_trainable, watch_trainable

PARTS = (
    *promotion.PARTS,
    *layers.PARTS,
    *graphs.PARTS,
    *calls.PARTS,
    *masks.PARTS,
    *drawing.PARTS,
    *losses.PARTS,
    *optimizers.PARTS,
    *other_frameworks.PARTS,
    *trainable.PARTS,
)
"""Each with a test of itself."""

__all__ = [
    "PARTS",
    "add_losses",
    "apply_as_given",
    "as_read",
    "assignments",
    "axis_of_classes",
    "counting_losses",
    "disown_losses",
    "draw_unseeded_by",
    "draws_random_numbers",
    "hooks_of",
    "register_weights",
    "initial_draws",
    "is_built",
    "is_functional",
    "is_seed",
    "is_stateless",
    "is_training",
    "keep_64_bits",
    "layer_of_error",
    "layers_of",
    "mask_of",
    "moved_by",
    "moved_seeds",
    "nodes_of",
    "parts_of",
    "plain_losses",
    "reduced",
    "seeded_generators",
    "set_mask",
    "slots_of",
    "standardised_inputs",
    "surroundings",
    "take_rate",
    "top_k_of_all_floats",
    "uncast",
    "unwatch_trainable",
    "watch_trainable",
    "without_tensorflow",
]
