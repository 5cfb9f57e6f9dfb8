"""The parts of Keras that it does not document and isotrain uses; nothing else touches such parts.

Imported by adapters only after `keras_backend.set_backend`.
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
    autocast_value,
    is_stateless,
    is_training,
    layer_of_error,
    call_context,
    uncast,
)
from isotrain.adapters.keras_private.drawing import (
    set_default_generator,
    replaced_initializer_draws,
    is_seed,
    shifted_seeds,
    seeded_generators,
)
from isotrain.adapters.keras_private.graphs import is_functional, nodes_of, standardized_inputs
from isotrain.adapters.keras_private.layers import (
    add_losses,
    intercept_assignments,
    forget_losses,
    draws_random_numbers,
    hooks_of,
    layers_of,
    weights_updated_by,
    sublayers_of,
    register_weights,
)
from isotrain.adapters.keras_private.losses import (
    class_axis,
    observe_loss_denominators,
    is_built,
    local_mean_losses,
    weighted_mean,
    top_k_of_all_floats,
)
from isotrain.adapters.keras_private.masks import mask_of, set_mask
from isotrain.adapters.keras_private.optimizers import disable_gradient_reduction, slots_of, detach_schedule
from isotrain.adapters.keras_private.other_frameworks import without_tensorflow
from isotrain.adapters.keras_private.promotion import keep_float64
from isotrain.adapters.keras_private.trainable import unwatch_trainable, watch_trainable

PROBES = (
    *promotion.PROBES,
    *layers.PROBES,
    *graphs.PROBES,
    *calls.PROBES,
    *masks.PROBES,
    *drawing.PROBES,
    *losses.PROBES,
    *optimizers.PROBES,
    *other_frameworks.PROBES,
    *trainable.PROBES,
)
"""Each with a test of itself."""

__all__ = [
    "PROBES",
    "add_losses",
    "disable_gradient_reduction",
    "autocast_value",
    "intercept_assignments",
    "class_axis",
    "observe_loss_denominators",
    "forget_losses",
    "set_default_generator",
    "draws_random_numbers",
    "hooks_of",
    "register_weights",
    "replaced_initializer_draws",
    "is_built",
    "is_functional",
    "is_seed",
    "is_stateless",
    "is_training",
    "keep_float64",
    "layer_of_error",
    "layers_of",
    "mask_of",
    "weights_updated_by",
    "shifted_seeds",
    "nodes_of",
    "sublayers_of",
    "local_mean_losses",
    "weighted_mean",
    "seeded_generators",
    "set_mask",
    "slots_of",
    "standardized_inputs",
    "call_context",
    "detach_schedule",
    "top_k_of_all_floats",
    "uncast",
    "unwatch_trainable",
    "watch_trainable",
    "without_tensorflow",
]
