"""What a list of operations cannot hold: values that leave torch, and shapes that depend on values."""

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
_EXITS: set[Any] = {
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
_SHAPED_BY_VALUES = {aten.where.default, aten.nonzero_numpy.default}
"""Made of operations that torch tags so, and not tagged themselves."""
_FLAGS = {torch.bool, torch.uint8}
"""Of tensors that pick elements by whether they are true, not by their places."""


class UncapturableError(Exception):
    """A computation cannot be replayed from a record; says why."""


class ForbidValueReads(TorchFunctionMode):
    """Within it, what is recorded gives no value of a tensor to Python or NumPy: a record would freeze it.

    Conversions to what a tensor already is, of which Keras asks for two with each operation, are not written
    down: that took longer than all else.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Computes as ever.

        Raises:
            UncapturableError: A value that depends on the batch or on weights is to leave; or a transform is
                calling a function, and what this computes would not be written down.
        """
        if private_api.is_in_vmap():
            raise UncapturableError(CALLED_BY_VMAP)
        if func in _EXITS and _is_recorded(args[0]):
            raise UncapturableError(VALUE_DEPENDENT)
        if func is torch.Tensor.to and not kwargs and _is_already(*args):
            return args[0]
        return func(*args, **(kwargs or {}))


def _is_already(tensor: torch.Tensor, wanted: Any, *others: Any) -> bool:
    """Whether a tensor has the type, or is on the device, that it is converted to: it gives itself then."""
    if others:
        return False
    if isinstance(wanted, str | torch.device):
        return tensor.device == torch.device(wanted)
    return isinstance(wanted, torch.dtype) and tensor.dtype == wanted


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether another step may have another value here."""
    if isinstance(tensor, torch.nn.Parameter) or not private_api.is_tracing():
        return True
    node = private_api.node_of(tensor)
    return node is not None and _follows_from_what_is_given(node)


def _follows_from_what_is_given(node: Node) -> bool:
    """Whether a result depends on an argument of the graph, and not on constants alone."""
    seen = {node}
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder":
            return True
        waiting += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)
    return False


def require_fixed_shapes(graph: Graph) -> None:
    """Makes sure that shapes follow from shapes: Python that looks at one would depend on values.

    Raises:
        UncapturableError: That of a result depends on the numbers of the batch or of weights.
    """
    given: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or given.intersection(node.all_input_nodes):
            given.add(node)
            if given.intersection(_shaping(node)):
                name = str(node.target).removeprefix("aten.").partition(".")[0]
                raise UncapturableError(f"the shape of what {name} gives depends on values")


def _shaping(node: Node) -> Iterator[Node]:
    """The arguments whose numbers tell the shape of what an operation gives."""
    is_tagged = torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())
    if node.target == aten.index.Tensor:
        yield from (each for each in node.args[1] if each and each.meta["val"].dtype in _FLAGS)
    elif node.target == aten.repeat_interleave.self_Tensor:
        yield node.args[1]
    elif node.target == aten.one_hot.default and node.args[1:] not in ((), (-1,)):
        return
    elif is_tagged or node.target in _SHAPED_BY_VALUES:
        yield from node.all_input_nodes
