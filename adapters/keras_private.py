"""The parts of Keras that it does not document and isotrain uses; nothing else touches such parts.

Imported by adapters only after `keras_backend.claim`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras.src import backend
from keras.src.backend.common import dtypes, global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.losses import loss as loss_module
from keras.src.models.functional import Functional
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, draw_seed

from isotrain.adapters.private_parts import PrivatePart, require
from isotrain.plugin import UnsupportedError

_SEED_STATE = "seed_generator_state"
_CALL, _AUTOCAST = "current_call_ctx", "autocast_scope"
_SURROUNDINGS = (_CALL, _AUTOCAST)


def keep_64_bits() -> None:
    """Makes type promotion keep float64: on torch, products and means would become float32."""
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def _keeps_64_bits() -> None:
    table, before = dtypes.BIT64_TO_BIT32_DTYPE, dict(dtypes.BIT64_TO_BIT32_DTYPE)
    ones = keras.ops.ones(2, dtype="float64")
    if keras.backend.standardize_dtype(ones.dtype) != "float64":
        return  # JAX has no float64 before it is asked to
    keep_64_bits()
    try:
        mean = keras.ops.mean(ones)
        found = keras.backend.standardize_dtype(mean.dtype)
    finally:
        table.update(before)
    require(found == "float64", f"the mean of float64 in float64, not in {found}")


@contextlib.contextmanager
def initial_draws(draws: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Replaces the functions that initializers draw with.

    Args:
        draws: `normal`, `uniform`, `truncated_normal`: from Keras' own function to another.
    """
    with contextlib.ExitStack() as replaced:
        for name, made in draws.items():
            original = getattr(backend.random, name)
            replaced.enter_context(_replaced(backend.random, name, made(original)))
        yield


def _draws_otherwise() -> None:
    def ones(original: Any) -> Any:
        return lambda shape, *args, **options: keras.ops.ones(shape)

    makers = {
        "normal": keras.initializers.RandomNormal,
        "uniform": keras.initializers.RandomUniform,
        "truncated_normal": keras.initializers.TruncatedNormal,
    }
    with initial_draws(dict.fromkeys(makers, ones)):
        for name, maker in makers.items():
            drawn = keras.ops.convert_to_numpy(maker(seed=1)((2,)))
            require(bool((drawn == 1).all()), f"initializers draw with backend.random.{name}")


def layers_of(layer: keras.Layer) -> list[keras.Layer]:
    """A layer and all that are inside it, at any depth."""
    return [layer, *layer._flatten_layers(include_self=False)]


def _finds_inner_layers() -> None:
    inner = keras.layers.Dense(1)
    outer = keras.Sequential([keras.Sequential([inner])])
    found = layers_of(outer)
    require(found[0] is outer and any(each is inner for each in found), "layers at any depth")


def draws_random_numbers(layer: keras.Layer) -> bool:
    """Whether a layer has a generator of random numbers of its own."""
    return bool(layer._seed_generators)


def _knows_who_draws() -> None:
    require(draws_random_numbers(keras.layers.Dropout(0.5)), "a generator in Dropout")
    require(not draws_random_numbers(keras.layers.Dense(1)), "no generator in Dense")


def moved_by(layer: keras.Layer) -> list[Any]:
    """The weights that a layer itself moves, whether it is frozen or not."""
    return list(layer._non_trainable_variables)


def _knows_who_moves() -> None:
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    layer.trainable = False
    moved = {id(variable) for variable in moved_by(layer)}
    require(
        moved == {id(layer.moving_mean), id(layer.moving_variance)}, "the moving mean and variance"
    )


def add_losses(layers: Iterable[keras.Layer]) -> bool:
    """Whether any layer has added a loss of its own while it was called last."""
    return any(layer._losses or layer._loss_ids for layer in layers)


def _notices_added_losses() -> None:
    layer = keras.layers.ActivityRegularization(l2=1.0)
    require(not add_losses([layer]), "no loss before the call")
    layer(keras.ops.ones((1, 2)))
    require(add_losses([layer]), "a loss after the call")


def is_built(metric: keras.metrics.Metric) -> bool:
    """Whether a metric has all its variables; some make them when they see the first samples."""
    return bool(getattr(metric, "_built", True))


def _knows_what_is_built() -> None:
    metric = keras.metrics.R2Score()
    require(not is_built(metric), "R2Score without variables before its first samples")
    metric.update_state(keras.ops.ones((2, 1)), keras.ops.zeros((2, 1)))
    require(is_built(metric), "R2Score with its variables afterwards")


@contextlib.contextmanager
def moved_seeds(moved: Callable[[Any], Any]) -> Iterator[None]:
    """Makes random layers draw with `moved(seed)`; the generators' states stay as they are."""
    original = keras.random.SeedGenerator.next

    def drawn(generator: keras.random.SeedGenerator, ordered: bool = True) -> Any:
        return moved(original(generator, ordered))

    with _replaced(keras.random.SeedGenerator, "next", drawn):
        yield


def _moves_seeds() -> None:
    def draw(shift: int) -> np.ndarray:
        with moved_seeds(lambda seed: seed + shift):
            drawn = keras.random.uniform((4,), seed=keras.random.SeedGenerator(1))
        return np.asarray(keras.ops.convert_to_numpy(drawn))

    require(bool((draw(0) == draw(0)).all()), "the same numbers from the same seed")
    require(bool((draw(0) != draw(1)).any()), "other numbers from a moved seed")


def assignments(note: Callable[[Any, Any], None]) -> contextlib.AbstractContextManager[None]:
    """Has `note(variable, value)` called in place of every assignment to a variable, which stays as it is."""
    return _replaced(keras.Variable, "assign", note)


def _notes_assignments() -> None:
    layer, seen = keras.layers.BatchNormalization(), []
    layer.build((None, 2))
    before = keras.ops.convert_to_numpy(layer.gamma)
    with assignments(lambda variable, value: seen.append(id(variable))):
        layer.load_own_variables({str(place): np.full(2, 7.0) for place in range(4)})
    require(seen == [id(v) for v in layer.variables], "each variable of a layer is assigned to")
    require(bool((keras.ops.convert_to_numpy(layer.gamma) == before).all()), "and none is changed")


def draw_unseeded_by(generator: keras.random.SeedGenerator | None) -> None:
    """Makes a generator the one that this thread draws by where Keras is given no seed."""
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def _draws_by_the_global_generator() -> None:
    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    generator = keras.random.SeedGenerator(5)
    draw_unseeded_by(generator)
    keras.random.uniform((1,))
    draw_unseeded_by(before)
    state = keras.ops.convert_to_numpy(generator.state.value)
    require(state.tolist() != [5, 0], "a draw without a seed moves the global generator")


def seeded_generators(made: Callable[[Any, Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Makes random operations on torch draw from the generators that another function makes.

    Args:
        made: From the two numbers of a drawn seed, which are tensors, to a generator.
    """
    return _replaced(backend.random, "torch_seed_generator", lambda seed: made(*draw_seed(seed)))


def _makes_generators() -> None:
    if keras.backend.backend() != "torch":
        return
    import torch

    seeds = []

    def made(first: Any, second: Any) -> Any:
        seeds.append((int(first), int(second)))
        return torch.Generator().manual_seed(int(first + second) & 0xFFFFFFFF)

    source = keras.random.SeedGenerator(5)
    with seeded_generators(made):
        given = keras.random.uniform((4,), seed=source)
    source.state.assign([5, 0])
    require(seeds == [(5, 0)], "a generator is made of the seed (5, 0)")
    require(bool((keras.random.uniform((4,), seed=source) == given).all()), "equal numbers of it")


def parts_of(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that are right inside of a layer."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def _finds_parts() -> None:
    dense, inner = keras.layers.Dense(1), keras.Sequential(name="inner")
    inner.add(dense)
    inner.build((None, 2))
    found = parts_of(keras.Sequential([inner]))
    require([each for each in found if each is not inner] == [], "no more than the layers inside")
    require(any(each is dense for each in parts_of(inner)), "a layer in a Sequential")


def is_functional(model: Any) -> bool:
    """Whether a model is a graph of layers."""
    return isinstance(model, Functional)


def nodes_of(model: keras.Model) -> list[Any]:
    """The calls of a functional model's layers and operations, in an order in which they can be made."""
    by_depth = model._nodes_by_depth
    ordered = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node for node in ordered if node.operation and not node.is_input]


def standardised_inputs(model: keras.Model, inputs: Any) -> list[Any]:
    """The inputs of a functional model as it calls its first layers with them, one after the other."""
    return list(model._standardize_inputs(inputs))


def _knows_graphs() -> None:
    first, second = keras.layers.Dense(2), keras.layers.Dense(1)
    inputs = keras.Input((3,))
    hidden = first(inputs)
    model = keras.Model(inputs, keras.ops.add(second(hidden), hidden))
    require(is_functional(model) and not is_functional(keras.Sequential()), "graphs of layers")
    nodes = nodes_of(model)
    require([node.operation for node in nodes[:2]] == [first, second], "layers in their order")
    known = {id(inputs): standardised_inputs(model, np.ones((1, 3)))[0]}
    for node in nodes:
        args, kwargs = node.arguments.fill_in(known)
        known[id(node.outputs[0])] = node.operation(*args, **kwargs)
    found = known[id(model.outputs[0])]
    require(bool(keras.ops.all(found == model(np.ones((1, 3))))), "the model, call by call")


def is_training() -> bool:
    """Whether the layer that is being called was called to train."""
    context = global_state.get_global_attribute(_CALL)
    return context is not None and bool(context.get_value("training"))


def surroundings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """What is around the layer that is being called, to call it there again: whether it trains, its types."""
    around = {name: global_state.get_global_attribute(name) for name in _SURROUNDINGS}
    return lambda: _surrounded(around)


@contextlib.contextmanager
def _surrounded(around: Mapping[str, Any]) -> Iterator[None]:
    before = {name: global_state.get_global_attribute(name) for name in around}
    for name, value in around.items():
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def uncast() -> contextlib.AbstractContextManager[None]:
    """Within it, variables are read in their own types, also inside of a layer in mixed precision."""
    return _surrounded({_AUTOCAST: None})


def _calls_again() -> None:
    class Noting(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            with uncast():
                own = keras.backend.standardize_dtype(self.scale.value.dtype)
            cast = keras.backend.standardize_dtype(self.scale.value.dtype)
            seen.append((is_training(), own, cast))
            self.again = surroundings()
            return inputs

    seen: list[tuple[bool, str, str]] = []
    layer = Noting(dtype="mixed_bfloat16")
    layer.scale = layer.add_weight(shape=(), dtype="float32")
    layer.built = True
    keras.Sequential([layer])(keras.ops.ones((1, 2)), training=True)
    around = layer.again
    seen.clear()
    layer.call(keras.ops.ones((1, 2)))
    with around():
        layer.call(keras.ops.ones((1, 2)))
    require(seen[0] == (False, "float32", "float32"), "nothing around a layer that is not called")
    require(seen[1] == (True, "float32", "bfloat16"), "what was around it when it was")


def mask_of(tensor: Any) -> Any:
    """The mask that Keras has hung on a tensor; None without one."""
    return get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Hangs a mask on a tensor, where Keras' losses and metrics find it."""
    set_keras_mask(tensor, mask)


def _hangs_masks() -> None:
    given = keras.layers.Masking()(keras.ops.ones((1, 2, 3)))
    require(mask_of(given) is not None, "a mask on what Masking gives")
    plain = keras.ops.ones((2, 1))
    set_mask(plain, keras.ops.convert_to_tensor([True, False]))
    loss = keras.losses.MeanSquaredError(reduction="sum")(keras.ops.zeros((2, 1)), plain)
    require(float(loss) == 1.0, "a loss without the masked sample")


def layer_of_error(text: str) -> str | None:
    """The class of the layer in whose call an exception was raised, as Keras adds it to the message."""
    found = re.search(r"Exception encountered when calling (\w+)\.call\(\)", text)
    return found and found.group(1)


def _names_the_layer_of_an_error() -> None:
    def fail(inputs: Any) -> Any:
        raise ValueError("as meant")

    try:
        keras.layers.Lambda(fail)(keras.ops.ones((1, 2)))
    except ValueError as error:
        require(layer_of_error(str(error)) == "Lambda", "the layer's class in the message")


def hooks_of(layers: Iterable[keras.Layer]) -> list[Any]:
    """The tables of torch's hooks that wait for layers to be called; none on other frameworks."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [vars(layer)[name] for layer in layers for name in names if name in vars(layer)]


def _knows_hooks() -> None:
    if keras.backend.backend() != "torch":
        return
    layer = keras.layers.Dense(1)
    hooks = hooks_of([layer])
    require(not any(hooks), "no hooks on a new layer")
    layer.register_forward_hook(lambda *given: None)
    require(any(hooks), "a hook in the layer's table")


def plain_losses() -> contextlib.AbstractContextManager[None]:
    """Makes losses give the mean over the samples they get, also under a strategy of TensorFlow."""
    return _replaced(loss_module, "scale_loss_for_distribution", lambda value: value)


def _scales_losses() -> None:
    def doubled(value: Any) -> Any:
        return value * 2

    ones, zeros = keras.ops.ones((2, 1)), keras.ops.zeros((2, 1))
    with _replaced(loss_module, "scale_loss_for_distribution", doubled):
        loss = keras.losses.MeanSquaredError()(ones, zeros)
    require(float(loss) == 2.0, "losses are scaled by losses.loss.scale_loss_for_distribution")


@contextlib.contextmanager
def counting_losses(counted: Callable[[Any | None], None]) -> Iterator[None]:
    """Tells of every loss that is reduced to a mean what that mean counts by.

    Args:
        counted: Gets, for each, the number of places that a mask leaves, or the sum of the weights that the
            reduction divides by; None where it divides by the number of all places.
    """
    original = loss_module.reduce_weighted_values

    def noted(values: Any, sample_weight: Any, mask: Any, reduction: Any, dtype: Any) -> Any:
        weights = mask
        if reduction == "mean_with_sample_weight":
            weights = loss_module.apply_mask(sample_weight, mask, values.dtype, reduction)
        is_mean = reduction in ("mean", "sum_over_batch_size", "mean_with_sample_weight")
        is_alike = weights is None or not is_mean
        counted(None if is_alike else keras.ops.sum(keras.ops.cast(weights, values.dtype)))
        return original(values, sample_weight, mask, reduction, dtype)

    with _replaced(loss_module, "reduce_weighted_values", noted):
        yield


def reduced(values: Any, weights: Any | None, mask: Any | None) -> Any:
    """The mean of values over the places that a mask leaves, each times its sample's weight."""
    return loss_module.reduce_weighted_values(
        values,
        sample_weight=weights,
        mask=mask,
        reduction="sum_over_batch_size",
        dtype=values.dtype,
    )


def _counts_losses() -> None:
    found: list[Any] = []
    plain, masked = keras.ops.ones((2, 1)), keras.ops.ones((2, 1))
    set_mask(masked, keras.ops.convert_to_tensor([True, False]))
    with counting_losses(found.append):
        for predictions in (plain, masked):
            keras.losses.MeanSquaredError()(keras.ops.zeros((2, 1)), predictions)
    require(found[0] is None and float(found[1]) == 1.0, "what counts in a loss with a mask")
    weighed = reduced(plain[:, 0], keras.ops.convert_to_tensor([3.0, 1.0]), None)
    require(float(weighed) == 2.0, "the mean of weighed values")


def apply_as_given(optimizer: keras.optimizers.Optimizer) -> None:
    """Turns off the sum over replicas that an optimizer does on TensorFlow after it has clipped.

    Raises:
        UnsupportedError: This version of Keras reduces in another place.
    """
    if not hasattr(optimizer, "_all_reduce_sum_gradients"):
        raise UnsupportedError(
            f"Keras {keras.__version__} reduces gradients where isotrain does not expect it;"
            " install a version from 3.10 to 3.15."
        )
    optimizer._all_reduce_sum_gradients = list


def _reduces_where_expected() -> None:
    if keras.backend.backend() != "tensorflow":
        return
    optimizer, summed = keras.optimizers.SGD(), []

    def note(pairs: Any) -> Any:
        summed.append(pairs)
        return pairs

    apply_as_given(optimizer)
    optimizer._all_reduce_sum_gradients = note
    optimizer.apply([keras.ops.ones(1)], [keras.Variable([1.0])])
    require(len(summed) == 1, "gradients are summed over replicas by this method alone")


_SLOTS = {
    "momentum": ("momentums", "_momentums"),
    "velocity": ("_velocities",),
    "velocity_hat": ("_velocity_hats",),
    "average_gradient": ("_average_gradients",),
    "accumulator": ("_accumulators",),
}


def slots_of(optimizer: keras.optimizers.Optimizer) -> dict[str, list[Any]]:
    """The slots of one of Keras' own optimizers by kind, in the order of its weights."""
    return {
        kind: list(found)
        for kind, attributes in _SLOTS.items()
        for attribute in attributes
        if (found := getattr(optimizer, attribute, None))
    }


def _keeps_slots() -> None:
    optimizers = keras.optimizers
    weights = [keras.Variable([1.0]), keras.Variable([1.0, 2.0])]
    for optimizer in (
        optimizers.SGD(momentum=0.5),
        optimizers.Adam(amsgrad=True),
        optimizers.AdamW(),
        optimizers.RMSprop(momentum=0.5, centered=True),
        optimizers.Adagrad(),
        optimizers.Lamb(),
    ):
        optimizer.build(weights)
        slots = slots_of(optimizer)
        found = {id(slot) for each in slots.values() for slot in each}
        rates = {id(optimizer.iterations), id(optimizer.variables[1])}
        name = type(optimizer).__name__
        require(found | rates == {id(v) for v in optimizer.variables}, f"all slots of {name}")
        shapes = [[tuple(slot.shape) for slot in each] for each in slots.values()]
        require(all(each == [(1,), (2,)] for each in shapes), f"slots of {name} in order")


def is_seed(name: str) -> bool:
    """Whether a name is that of the state of a seed generator: (seed, draws so far)."""
    return name.endswith(_SEED_STATE)


def _names_seeds() -> None:
    generator = keras.random.SeedGenerator(5)
    state = keras.ops.convert_to_numpy(generator.state.value)
    require(is_seed(generator.state.path), f"a state whose path ends in {_SEED_STATE}")
    require(state.tolist() == [5, 0], "(seed, draws so far)")


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


PARTS = (
    PrivatePart("backend.common.dtypes.BIT64_TO_BIT32_DTYPE", _keeps_64_bits),
    PrivatePart("backend.random", _draws_otherwise),
    PrivatePart("Layer._flatten_layers", _finds_inner_layers),
    PrivatePart("Layer._flatten_layers, not recursive", _finds_parts),
    PrivatePart("Functional._nodes_by_depth and _standardize_inputs", _knows_graphs),
    PrivatePart("Layer._get_call_context and AutocastScope", _calls_again),
    PrivatePart("Layer._seed_generators", _knows_who_draws),
    PrivatePart("Layer._non_trainable_variables", _knows_who_moves),
    PrivatePart("Layer._losses and Layer._loss_ids", _notices_added_losses),
    PrivatePart("Metric._built", _knows_what_is_built),
    PrivatePart("SeedGenerator.next", _moves_seeds),
    PrivatePart("Layer.load_own_variables by Variable.assign", _notes_assignments),
    PrivatePart("random.seed_generator.GLOBAL_SEED_GENERATOR", _draws_by_the_global_generator),
    PrivatePart("backend.torch.random.torch_seed_generator", _makes_generators),
    PrivatePart("backend.common.masking", _hangs_masks),
    PrivatePart("Layer._forward_hooks", _knows_hooks),
    PrivatePart("messages of errors in layers", _names_the_layer_of_an_error),
    PrivatePart("losses.loss.scale_loss_for_distribution", _scales_losses),
    PrivatePart("losses.loss.reduce_weighted_values", _counts_losses),
    PrivatePart("Optimizer._all_reduce_sum_gradients", _reduces_where_expected),
    PrivatePart("SeedGenerator.state", _names_seeds),
    PrivatePart("slots of optimizers", _keeps_slots),
)
