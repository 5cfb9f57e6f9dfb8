"""Access to Keras' private API; no other module of isotrain uses it.

Imported by adapters only after `keras_backend.set_backend`.
"""

from __future__ import annotations

from isotrain.adapters.keras.private import (
    calls,
    class_targets,
    layers,
    losses,
    masks,
    misc,
    optimizers,
    rng,
)
from isotrain.adapters.keras.private.calls import (
    autocast_value,
    call_context,
    is_stateless,
    is_training,
    layer_of_error,
    uncast,
)
from isotrain.adapters.keras.private.class_targets import (
    refuse_wrong_classes,
    set_class_loss,
    top_k_of_all_targets,
)
from isotrain.adapters.keras.private.layers import (
    AttentionLayers,
    Moments,
    attention_layers,
    draws_random_numbers,
    forget_losses,
    has_set_moments,
    have_added_losses,
    hooks_of,
    intercept_assignments,
    is_functional,
    layers_of,
    nodes_of,
    register_weights,
    replace_value,
    set_moments,
    set_path,
    set_shape,
    standardized_inputs,
    sublayers_of,
    unwatch_trainable,
    variables_of,
    watch_trainable,
    weights_updated_by,
)
from isotrain.adapters.keras.private.losses import (
    class_axis,
    is_built,
    local_mean_losses,
    observe_loss_denominators,
    set_probability_loss,
    weighted_mean,
)
from isotrain.adapters.keras.private.masks import mask_of, set_mask
from isotrain.adapters.keras.private.misc import keep_float64, without_tensorflow
from isotrain.adapters.keras.private.optimizers import (
    OptionGroup,
    apply_by_groups,
    clipped_by_norm,
    detach_schedule,
    disable_gradient_reduction,
    slots_of,
)
from isotrain.adapters.keras.private.rng import (
    is_seed,
    replace_random_function,
    replaced_initializer_draws,
    seeded_generators,
    set_default_generator,
    shifted_seeds,
)

PROBES = (
    *layers.PROBES,
    *calls.PROBES,
    *masks.PROBES,
    *rng.PROBES,
    *losses.PROBES,
    *class_targets.PROBES,
    *optimizers.PROBES,
    *misc.PROBES,
)
"""Probes of every private part that is used, each with a self-test."""

__all__ = [
    "Moments",
    "PROBES",
    "AttentionLayers",
    "attention_layers",
    "set_shape",
    "replace_value",
    "has_set_moments",
    "have_added_losses",
    "clipped_by_norm",
    "disable_gradient_reduction",
    "OptionGroup",
    "apply_by_groups",
    "autocast_value",
    "intercept_assignments",
    "class_axis",
    "observe_loss_denominators",
    "forget_losses",
    "set_default_generator",
    "draws_random_numbers",
    "hooks_of",
    "register_weights",
    "set_path",
    "replace_random_function",
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
    "variables_of",
    "weights_updated_by",
    "shifted_seeds",
    "nodes_of",
    "sublayers_of",
    "local_mean_losses",
    "weighted_mean",
    "seeded_generators",
    "set_mask",
    "set_moments",
    "set_probability_loss",
    "slots_of",
    "standardized_inputs",
    "call_context",
    "detach_schedule",
    "refuse_wrong_classes",
    "set_class_loss",
    "top_k_of_all_targets",
    "uncast",
    "unwatch_trainable",
    "watch_trainable",
    "without_tensorflow",
]
