"""Large variables and results that have a shape and no values, so that any machine can plan any model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, NoReturn, Self

import tensorflow as tf

from isotrain.adapters.tensorflow.base import private_api

_LARGE_BYTES = 2**20
"""Size in bytes from which a variable has no value, and a function with such a tensor is not run."""
_READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}
"""Operations that do not assign to a variable."""


class MissingValueError(Exception):
    """Something read a value that is not there, in the context `WithoutValues`."""


class AbstractTensor:
    """Result of a traced function that was not run.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        device: Device that it would be on; empty: any.
    """

    device = ""

    def __init__(self, shape: tf.TensorShape, dtype: tf.DType) -> None:
        self.shape, self.dtype = shape, dtype

    def _read(self, *_: object, **__: object) -> NoReturn:
        """Refuses a read.

        Raises:
            MissingValueError: Always.
        """
        raise MissingValueError(f"a value was read of a result of shape {self.shape}")

    numpy = __array__ = __tf_tensor__ = __bool__ = __float__ = __int__ = __index__ = __iter__ = (
        _read
    )
    __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = _read
    __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _read
    __pow__ = __rpow__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _read
    __neg__ = __abs__ = __invert__ = __getitem__ = __len__ = __contains__ = __format__ = _read
    __lt__ = __le__ = __gt__ = __ge__ = _read
    __eq__ = __ne__ = _read
    __hash__ = object.__hash__


class WithoutValues:
    """Context in which variables of 1 MiB or more have no values, and functions that need them are not run.

    Such variables take no memory. A function with a tensor of that size, or one that reads such a variable,
    is traced alone; its results are `AbstractTensor`s, and variables that it would assign to lose their
    values. Reading a value of any of these raises an error.

    Attributes:
        entered: The context that this process is in; None outside.
    """

    entered: WithoutValues | None = None

    def __init__(self) -> None:
        self._creator = contextlib.ExitStack()
        self._variables: dict[int, tf.Variable] = {}
        """The variables that were made in this context, by the identities of their handles."""
        self._lacking: dict[int, tf.Tensor] = {}
        """Handles of the variables without values, by their identities."""

    def __enter__(self) -> Self:
        WithoutValues.entered = self
        self.create_variables()
        return self

    def __exit__(self, *error: Any) -> None:
        WithoutValues.entered = None
        self._creator.close()

    def create_variables(self) -> None:
        """Creates the variables of the default graph from here on, which Keras may just have reset."""
        self._creator.enter_context(tf.variable_creator_scope(self._created))

    def lacks_value(self, handle: tf.Tensor) -> bool:
        """Whether the variable with a handle was made without a value."""
        return id(handle) in self._lacking

    def _created(self, create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        """Creates a variable; without a value, if it is large or its initial value is not there."""
        initial, given_dtype = options["initial_value"], options.get("dtype")
        has_value = False
        try:
            described = _description(initial, given_dtype)
        except Exception:
            if not callable(initial):
                raise
            # it may compute by NumPy
            initial = options["initial_value"] = initial()
            described, has_value = _description(initial, given_dtype), True
        shape, dtype = described.shape, described.dtype
        is_small = _nbytes(shape, dtype) < _LARGE_BYTES
        if not isinstance(described, AbstractTensor) and (has_value or is_small):
            try:
                variable = create(**options)
                self._variables[id(variable.handle)] = variable
                return variable
            except tf.errors.FailedPreconditionError as error:  # computed of a variable without one
                if not is_missing_value(error):
                    raise
        for given in ("initial_value", "shape", "dtype"):
            options.pop(given, None)  # a variable would keep its initial value
        variable = private_api.uninitialized_variable(shape, dtype, **options)
        self._lacking[id(variable.handle)] = variable.handle
        return variable

    def drop_value(self, handle: tf.Tensor) -> None:
        """Takes the value of a variable of this context, which has this handle, away."""
        if (variable := self._variables.pop(id(handle), None)) is not None:
            private_api.drop_value(variable)
            self._lacking |= {id(each): each for each in (handle, variable.handle)}


def lacks_value(variable: tf.Variable) -> bool:
    """Whether a variable, any shape, was made without a value. Local."""
    entered = WithoutValues.entered
    return entered is not None and entered.lacks_value(private_api.copies(variable)[0].handle)


def is_missing_value(error: BaseException) -> bool:
    """Whether an error means that a value was read that is not there."""
    if isinstance(error, MissingValueError):
        return True
    return private_api.UNINITIALIZED in str(error) and isinstance(
        error, tf.errors.FailedPreconditionError
    )


class AbstractFunction:
    """A traced function that is run only where no large tensor takes part in it."""

    def __init__(self, function: Callable[..., Any], note_call: Callable[[tf.Graph], None]) -> None:
        """Traces nothing yet.

        Args:
            function: Python function of tensors, to trace.
            note_call: Called in each call, with the graph of the traced function.
        """
        self._traced = tf.function(function, autograph=False)
        self._note_call = note_call
        self._is_abstract: dict[Any, bool] = {}
        """Whether a traced function has large tensors."""

    def __call__(self, *arguments: Any) -> Any:
        """The function's results; `AbstractTensor`s in their places where it is not run."""
        concrete = self._traced.get_concrete_function(
            *tf.nest.map_structure(_as_argument, arguments)
        )
        self._note_call(concrete.graph)
        if concrete not in self._is_abstract:
            self._is_abstract[concrete] = _has_large_tensors(concrete.graph)
        is_given = not any(isinstance(each, AbstractTensor) for each in tf.nest.flatten(arguments))
        if is_given and not self._is_abstract[concrete]:
            return self._traced(*arguments)
        for handle in _assigned(concrete.graph):
            _entered().drop_value(handle)
        return tf.nest.map_structure(_as_result, concrete.graph.structured_outputs)

    def experimental_get_tracing_count(self) -> int:
        """Number of graphs that were traced."""
        return int(self._traced.experimental_get_tracing_count())


def computed_if_possible(function: Callable[..., Any], *arguments: Any) -> Any:
    """Result of a Python function of tensors; `AbstractTensor`s where values lack in the context. Local."""
    if WithoutValues.entered is not None:
        function = AbstractFunction(function, lambda graph: None)
    return function(*arguments)


def _as_argument(value: Any) -> Any:
    is_abstract = isinstance(value, AbstractTensor)
    return tf.TensorSpec(value.shape, value.dtype) if is_abstract else value


def _as_result(value: Any) -> Any:
    return AbstractTensor(value.shape, value.dtype) if tf.is_tensor(value) else value


def _has_large_tensors(graph: Any) -> bool:
    """Whether a function's graph reads a variable without a value, or has a tensor of 1 MiB or more."""
    if any(_entered().lacks_value(handle) for handle, _ in graph.captures):
        return True
    tensors = (each for operation in graph.get_operations() for each in operation.outputs)
    return any(_nbytes(each.shape, each.dtype) >= _LARGE_BYTES for each in tensors)


def _assigned(graph: Any) -> list[tf.Tensor]:
    """Handles of the variables that a function's graph may assign to."""
    return [
        handle
        for handle, inside in graph.captures
        if handle.dtype == tf.resource and {each.type for each in inside.consumers()} - _READS
    ]


def _entered() -> WithoutValues:
    assert WithoutValues.entered is not None, "such functions are made in the context"
    return WithoutValues.entered


def _nbytes(shape: tf.TensorShape, dtype: tf.DType) -> int:
    """Bytes of a tensor; 0 if its shape is not known."""
    if not shape.is_fully_defined() or dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return math.prod(shape.as_list()) * int(dtype.size)


def _description(initial: Any, dtype: Any) -> Any:
    """Something with the shape and the dtype of an initial value, which is not computed if it is a function.

    Args:
        initial: Initial value of any shape, or function that returns it.
        dtype: Dtype that a variable is to have; None: that of the value.
    """
    if isinstance(initial, AbstractTensor):
        return initial
    if not callable(initial):
        return tf.convert_to_tensor(initial, dtype)
    with tf.__internal__.FuncGraph("initial value").as_default():
        value = initial()
        if isinstance(value, AbstractTensor):
            return value
        tensor = tf.convert_to_tensor(value, dtype)
        return tf.TensorSpec(tensor.shape, tensor.dtype)
