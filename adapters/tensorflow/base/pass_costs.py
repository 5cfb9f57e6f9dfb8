"""Costs of a training step by the shapes of the tensors in its graph; nothing is computed."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf

from isotrain.plugin import PassCosts

_VIEWS = frozenset(
    {
        *("EnsureShape", "ExpandDims", "Identity", "IdentityN", "PreventGradient", "Reshape"),
        *("Snapshot", "Squeeze", "StopGradient"),
    }
)
"""Operations whose outputs are their inputs' memory."""
_IN_PLACE = frozenset(
    {
        *("Abs", "Add", "AddN", "AddV2", "BiasAdd", "ClipByValue", "Cos", "Div", "DivNoNan", "Elu"),
        *("EluGrad", "Erf", "Erfc", "Exp", "Expm1", "LeakyRelu", "LeakyReluGrad", "Log", "Log1p"),
        *("LogSoftmax", "Maximum", "Minimum", "Mul", "MulNoNan", "Neg", "Pow", "RealDiv"),
        *("Reciprocal", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Rsqrt", "RsqrtGrad", "Select"),
        *("SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Softmax"),
        *("Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "Sqrt", "SqrtGrad", "Square"),
        *("SquaredDifference", "Sub", "Tanh", "TanhGrad", "Xdivy", "Xlogy"),
    }
)
"""Operations that write into the memory of an input that nobody else needs."""
_KEPT = frozenset({"Const", "ReadVariableOp", "VarHandleOp", "Placeholder"})
"""Operations whose outputs are there before and after the step."""

_CONVOLUTIONS = {"Conv2D": -1, "Conv3D": -1, "DepthwiseConv2dNative": 2}
"""Kinds of convolutions, and up to which axis an output has a product with each of the weights."""


class _NotCountedError(Exception):
    """An operation does not tell what its outputs take."""


@dataclass(eq=False)
class _Memory:
    """Memory of one tensor or of several that are views of each other.

    Attributes:
        nbytes: Its size.
        pending: Number of times that operations still read it.
    """

    nbytes: int
    pending: int = 0


@contextlib.contextmanager
def functions_inlined() -> Iterator[None]:
    """Context in which a `tf.function` that is called within another one adds its operations to that."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def pass_costs(
    operations: Sequence[tf.Operation], loss: tf.Tensor, gradients: Sequence[tf.Tensor]
) -> PassCosts | None:
    """Costs of the forward and the backward pass of a slice; None where an operation does not tell them.

    Operations are taken to run in the order in which they were traced, and to free what none reads any more.
    TensorFlow computes what is independent in any order, and so may need more or less.

    Args:
        operations: Operations that were traced for them, in order.
        loss: Loss, any shape.
        gradients: Gradients of the weights, any shapes, whose memory is left out.
    """
    needed = _needed(operations, [loss, *gradients])
    live = _LiveBytes(needed, loss, gradients)
    flops = moved = 0
    try:
        for operation in needed:
            live.run(operation)
            if operation.type not in _VIEWS | _KEPT:
                flops += _flops(operation)
                moved += sum(map(_nbytes, (*operation.inputs, *operation.outputs)))
    except _NotCountedError:
        return None
    return PassCosts(live.peak, flops, moved)


def _needed(operations: Sequence[tf.Operation], results: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """The operations that results, of any shapes, are computed by, in order."""
    waiting, found = [each.op for each in results], set()
    while waiting:
        operation = waiting.pop()
        if operation not in found:
            found.add(operation)
            waiting += [each.op for each in operation.inputs]
            waiting += operation.control_inputs
    return [each for each in operations if each in found]


class _LiveBytes:
    """Counts the bytes of the tensors that operations make, until they are freed.

    Attributes:
        peak: Largest number of bytes at a time.
    """

    def __init__(
        self, operations: Sequence[tf.Operation], loss: tf.Tensor, gradients: Sequence[tf.Tensor]
    ) -> None:
        """Counts who reads each tensor; nothing has run yet."""
        self.peak = self._current = 0
        self._reads = Counter(each.ref() for operation in operations for each in operation.inputs)
        self._reads[loss.ref()] += 1  # somebody else reads it in the end
        self._left_out = {_origin(each).ref() for each in gradients}
        self._memory: dict[object, _Memory] = {}

    def run(self, operation: tf.Operation) -> None:
        """Runs an operation; all that computes its inputs has run.

        Raises:
            _NotCountedError: It does not tell what its outputs take.
        """
        inputs = [
            self._memory[each.ref()] for each in operation.inputs if each.ref() in self._memory
        ]
        if operation.type not in _KEPT:
            for index, tensor in enumerate(operation.outputs):
                memory = self._memory_of(operation, index, tensor, inputs)
                if memory is not None:
                    self._memory[tensor.ref()] = memory
                    memory.pending += self._reads[tensor.ref()]
        self.peak = max(self.peak, self._current)
        for memory in inputs:
            memory.pending -= 1
        outputs = [self._memory[t.ref()] for t in operation.outputs if t.ref() in self._memory]
        for memory in {*inputs, *outputs}:
            if not memory.pending:
                self._current -= memory.nbytes
                memory.nbytes = 0

    def _memory_of(
        self, operation: tf.Operation, index: int, tensor: tf.Tensor, inputs: Sequence[_Memory]
    ) -> _Memory | None:
        """Memory of an output; None for that of a variable, or of a tensor that was there before."""
        if operation.type in _VIEWS:
            return self._memory.get(operation.inputs[index].ref())
        if tensor.dtype == tf.resource:
            return None
        if tensor.ref() in self._left_out:
            return None
        nbytes = _nbytes(tensor)
        if operation.type in _IN_PLACE and index == 0:
            for memory in inputs:
                if memory.nbytes == nbytes and memory.pending == inputs.count(memory):
                    return memory
        self._current += nbytes
        return _Memory(nbytes)


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor of which one is a view, any shape."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _nbytes(tensor: tf.Tensor) -> int:
    """Bytes of a tensor.

    Raises:
        _NotCountedError: It is a list of tensors, or what a function returns, or its shape is unknown.
    """
    if tensor.dtype == tf.resource:
        return 0
    if tensor.dtype == tf.variant:
        raise _NotCountedError
    return _elements(tensor) * tensor.dtype.size


def _elements(tensor: tf.Tensor) -> int:
    """Number of elements of a tensor.

    Raises:
        _NotCountedError: It is what a function returns, or its shape is unknown.
    """
    if tensor.shape.is_fully_defined():
        elements = tensor.shape.num_elements()
        if elements > 1 and any(
            each.type in ("func", "list(func)") for each in tensor.op.op_def.attr
        ):
            raise _NotCountedError
        return int(elements)
    if tensor.op.type in ("BroadcastGradientArgs", "FusedBatchNormV3"):
        return 0  # axes; what cuDNN alone keeps
    for (
        reader
    ) in tensor.consumers():  # gradients of what is broadcast: a sum over axes that are computed
        if reader.type == "Reshape" and reader.outputs[0].shape.is_fully_defined():
            return int(reader.outputs[0].shape.num_elements())
    raise _NotCountedError


def _flops(operation: tf.Operation) -> int:
    """Floating-point operations of a matrix product or a convolution; 0 for all others."""
    kind, inputs = operation.type, operation.inputs
    if kind == "MatMul":
        contracted = inputs[0].shape[0 if operation.get_attr("transpose_a") else 1]
        return 2 * _elements(operation.outputs[0]) * contracted
    if kind in ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        contracted = inputs[0].shape[-2 if operation.get_attr("adj_x") else -1]
        return 2 * _elements(operation.outputs[0]) * contracted
    if kind == "Einsum" and len(inputs) == 2:
        return _flops_of_einsum(operation)
    convolution = next((each for each in _CONVOLUTIONS if kind.startswith(each)), None)
    if convolution is None:
        return 0
    of_gradient = kind.removeprefix(convolution)
    is_of_filter = of_gradient.startswith("BackpropFilter")
    weights = (operation.outputs[0] if is_of_filter else inputs[1]).shape
    images = inputs[2] if of_gradient else operation.outputs[0]
    return 2 * _elements(images) * math.prod(weights[: _CONVOLUTIONS[convolution]])


def _flops_of_einsum(operation: tf.Operation) -> int:
    """Floating-point operations of a product of two tensors by labels, such as `abc,cd->abd`."""
    terms = operation.get_attr("equation").decode().split("->")[0].split(",")
    lengths: dict[object, int] = {}
    for term, tensor in zip(terms, operation.inputs, strict=True):
        first, dots, last = term.partition("...")
        others = tensor.shape.rank - len(first) - len(last)
        labels = [*first, *(range(-others, 0) if dots else ()), *last]
        for label, length in zip(labels, tensor.shape, strict=True):
            lengths[label] = max(lengths.get(label, 1), length)
    return 2 * math.prod(lengths.values())
