"""Checks of what an fx graph cannot hold: values read by Python, and shapes that depend on values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.graph.passes.nodes import aten

VALUE_DEPENDENT = "Python depends on the value of a tensor"
CALLED_BY_VMAP = (
    "a function is called by torch.vmap (keras.ops.vectorized_map) or another transform"
)
_VALUE_READS: set[Any] = {
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.data.__get__,
    torch.Tensor.__array__,
    torch.Tensor.__deepcopy__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
}
_UNTAGGED_DYNAMIC_SHAPES = {aten.where.default, aten.nonzero_numpy.default}
"""Composites of operations with the tag `dynamic_output_shape` that do not have the tag themselves."""
_MASK_DTYPES = {torch.bool, torch.uint8}
"""Dtypes of index tensors that are masks, not indices."""


class UncapturableError(Exception):
    """A computation cannot be captured; the message says why."""


class ForbidValueReads(TorchFunctionMode):
    """Torch-function mode that refuses to give values of traced tensors to Python: a graph would freeze them.

    It also skips conversions of a tensor to its own dtype or device, of which Keras calls two with each
    operation: tracing them took longer than all else.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls the function unchanged.

        Raises:
            UncapturableError: Python reads a value that depends on the batch or on weights; or a transform
                such as `torch.vmap` calls the function, whose operations would not be traced.
        """
        if private_api.is_in_vmap():
            raise UncapturableError(CALLED_BY_VMAP)
        if func in _VALUE_READS and _is_variable(args[0]):
            raise UncapturableError(VALUE_DEPENDENT)
        if func is torch.Tensor.to and not kwargs and _is_no_op_conversion(*args):
            return args[0]
        return func(*args, **(kwargs or {}))


def _is_no_op_conversion(tensor: torch.Tensor, target: Any, *others: Any) -> bool:
    """Whether `Tensor.to` returns the tensor itself, as it has that dtype or device already."""
    if others:
        return False
    if isinstance(target, str | torch.device):
        return tensor.device == torch.device(target)
    return isinstance(target, torch.dtype) and tensor.dtype == target


def _is_variable(tensor: torch.Tensor) -> bool:
    """Whether a tensor, of any shape, may have another value in another step."""
    if isinstance(tensor, torch.nn.Parameter) or not private_api.is_tracing():
        return True
    node = private_api.node_of(tensor)
    return node is not None and _depends_on_arguments(node)


def _depends_on_arguments(node: Node) -> bool:
    """Whether a node depends on an argument of the graph, and not on constants alone."""
    seen = {node}
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op == "placeholder":
            return True
        pending += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)
    return False


def require_fixed_shapes(graph: Graph) -> None:
    """Checks that shapes depend on shapes alone: Python that reads one would depend on values.

    Raises:
        UncapturableError: The shape of a result depends on values of the batch or of weights.
    """
    variable_nodes: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or variable_nodes.intersection(node.all_input_nodes):
            variable_nodes.add(node)
            if variable_nodes.intersection(_shape_sources(node)):
                name = str(node.target).removeprefix("aten.").partition(".")[0]
                raise UncapturableError(f"the output shape of {name} depends on values")


def _shape_sources(node: Node) -> Iterator[Node]:
    """The arguments whose values determine the output shape of an operation."""
    is_tagged = torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
    if node.target == aten.index.Tensor:
        yield from (
            each for each in node.args[1] if each and each.meta["val"].dtype in _MASK_DTYPES
        )
    elif node.target == aten.repeat_interleave.self_Tensor:
        yield node.args[1]
    elif node.target == aten.one_hot.default and node.args[1:] not in ((), (-1,)):
        return
    elif is_tagged or node.target in _UNTAGGED_DYNAMIC_SHAPES:
        yield from node.all_input_nodes
