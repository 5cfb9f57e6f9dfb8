"""Graph passes that change no bit: no-op conversions, constant folding, dead-code elimination."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.graph.passes.draws import merge_draws
from isotrain.adapters.torch.graph.passes.nodes import aten, is_only_used_by

_LIBRARY = torch.library.Library("isotrain", "DEF")
_LIBRARY.define("seed(Tensor value, int generator) -> Tensor")
_LIBRARY.impl("seed", lambda value, generator: value.clone(), "CompositeExplicitAutograd")
"""Marker operation in a trace: `value` is the seed of the generator with this index."""
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.contiguous.default}
_LIFTED = {aten.lift_fresh_copy.default, aten.lift_fresh.default}
_COPIES = {*_LIFTED, aten.detach_.default}
_SELECTS = {aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther}
_MAX_FOLDED = 4096
"""Number of elements up to which a constant result is computed at capture rather than in every step."""


def simplify(
    module: GraphModule, variables: int, generators: Sequence[torch.Generator]
) -> list[torch.Tensor]:
    """Simplifies a traced graph in place.

    Args:
        module: Traced graph; its tensor attributes become arguments of the graph.
        variables: Number of leading arguments for variables; those for the tensors come next.
        generators: Random generators that the graph seeds.

    Returns:
        The tensors, any shape and dtype, in the order of their arguments.
    """
    graph = module.graph
    _seed_generators(module, generators)
    _drop_casts(graph)
    merge_draws(graph)
    constants = _Constants(module)
    constants.fold()
    constants.fold_selects()
    drop_unused(graph)
    tensors = constants.as_arguments(variables)
    graph.lint()
    module.recompile()
    return tensors


def _seed_generators(module: GraphModule, generators: Sequence[torch.Generator]) -> None:
    """Replaces the seed markers by calls that seed the graph's generators."""
    for index, generator in enumerate(generators):
        setattr(module, f"generator_{index}", generator)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.isotrain.seed.default):
        value, index = node.args
        with module.graph.inserting_before(node):
            generator = module.graph.create_node("get_attr", f"generator_{index}")
            module.graph.call_function(_seed, (generator, value))
        module.graph.erase_node(node)


def _seed(generator: torch.Generator, value: torch.Tensor) -> None:
    """Seeds a generator as Keras does with a drawn seed (an integer scalar)."""
    generator.manual_seed(int(value) & 0xFFFFFFFF)


def meta(node: Node) -> Any:
    """Shape, dtype and strides of a node's result; None if it is not a tensor."""
    return node.meta.get("tensor_meta")


def _drop_casts(graph: Graph) -> None:
    """Removes conversions of a tensor to its own dtype, device or layout."""
    for node in list(graph.nodes):
        if node.target in _CASTS and _is_no_op(node):
            replace(node, node.args[0])


def _is_no_op(node: Node) -> bool:
    """Whether a conversion returns its argument."""
    source = node.args[0]
    before, after = meta(source), meta(node)
    if before is None or after is None or "copy" in node.kwargs or len(node.args) > 3:
        return False
    is_same_device = source.meta["val"].device == node.meta["val"].device
    return is_same_device and (before.dtype, before.stride, before.shape) == (
        after.dtype,
        after.stride,
        after.shape,
    )


def replace(node: Node, other: Node) -> None:
    """Replaces a node by another one in all its users, and erases it."""
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def is_pure(node: Node) -> bool:
    """Whether an operation has no side effects and is deterministic."""
    schema = private_api.schema_of(node.target)
    if node.op != "call_function" or schema is None or node.target in private_api.ASSERTIONS:
        return False
    return not schema.is_mutable and not draws(node)


def draws(node: Node) -> bool:
    """Whether a node draws random numbers or is a generator."""
    tags = getattr(node.target, "tags", ())
    return node.op == "get_attr" or torch.Tag.nondeterministic_seeded in tags


def drop_unused(graph: Graph) -> None:
    """Eliminates dead code: pure operations without users."""
    for node in reversed(list(graph.nodes)):
        if not node.users and (is_pure(node) or node.op == "get_attr"):
            graph.erase_node(node)


def _aliases(node: Node) -> bool:
    """Whether an operation writes to an argument or returns a view of one."""
    schema = private_api.schema_of(node.target)
    return schema is None or any(a.alias_info is not None for a in schema.arguments)


def _is_literal(node: Node) -> bool:
    """Whether a tensor was made of Python numbers during the trace, so that nothing outside refers to it."""
    return all(user.target in _LIFTED for user in node.users)


class _Constants:
    """Tensor attributes of a graph, and constant folding over them."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._graph = module.graph
        self._values: dict[Node, torch.Tensor] = {
            node: value
            for node in self._graph.find_nodes(op="get_attr")
            if isinstance(value := getattr(module, node.target), torch.Tensor)
        }
        self._literals = {node: v for node, v in self._values.items() if _is_literal(node)}

    def fold(self) -> None:
        """Folds results that depend on literals alone; tensors that user code made may change later."""
        values = dict(self._literals)
        candidates = self._candidates(values)
        for node in list(self._graph.nodes):
            if node in candidates:
                values[node] = self._computed(node, values)
        for node in candidates:
            if any(user not in candidates for user in node.users):
                self._store(node, values[node])

    def _candidates(self, literals: Iterable[Node]) -> set[Node]:
        """Operations on literals that no remaining operation aliases."""
        candidates = set(literals)
        for node in self._graph.nodes:
            if self._is_foldable(node, candidates):
                candidates.add(node)
        candidates -= set(literals)
        while unsafe := {node for node in candidates if self._is_aliased(node, candidates)}:
            candidates -= unsafe
            candidates = {node for node in candidates if not unsafe & set(node.all_input_nodes)}
        return candidates

    @staticmethod
    def _is_aliased(node: Node, folded: set[Node]) -> bool:
        """Whether an operation that is not folded writes to a node's result or returns a view of it."""
        return any(
            user.op == "call_function" and user not in folded and _aliases(user)
            for user in node.users
        )

    @staticmethod
    def _is_foldable(node: Node, constants: set[Node]) -> bool:
        if not (is_pure(node) or node.target in _COPIES) or meta(node) is None:
            return False
        is_small = meta(node).shape.numel() <= _MAX_FOLDED
        return is_small and all(source in constants for source in node.all_input_nodes)

    @staticmethod
    def _computed(node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
        """Result of a node, any shape, from the values of its arguments."""
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        with torch.no_grad():
            if node.target in _COPIES:
                return args[0].clone()
            return node.target(*args, **kwargs)

    def _store(self, node: Node, value: torch.Tensor) -> None:
        """Replaces a node by its value, of any shape, as a tensor attribute of the graph."""
        name = f"folded_{len(self._values)}"
        setattr(self._module, name, value)
        with self._graph.inserting_before(node):
            attribute = self._graph.create_node("get_attr", name)
        attribute.meta = dict(node.meta)
        self._values[attribute] = self._literals[attribute] = value
        node.replace_all_uses_with(attribute)

    def fold_selects(self) -> None:
        """Replaces `where` with a constant, uniform condition by the tensor that it selects."""
        for node in list(self._graph.nodes):
            if node.target in _SELECTS and (selected := self._selected(node)) is not None:
                replace(node, selected)

    def _selected(self, node: Node) -> Node | None:
        """Tensor that a `where` always selects; None if that may change results, gradients or aliases."""
        condition, *operands = node.args
        value = self._literals.get(condition)
        if value is None or bool(value.any()) != bool(value.all()):
            return None
        selected, dropped = operands if bool(value.all()) else reversed(operands)
        if not is_only_used_by(selected, node) or not is_pure(selected) or _aliases(selected):
            return None
        if isinstance(dropped, Node) and dropped not in self._literals:
            return None
        before, after = meta(node), meta(selected)
        is_same = (before.shape, before.dtype) == (after.shape, after.dtype)
        return selected if is_same else None

    def as_arguments(self, start: int) -> list[torch.Tensor]:
        """Turns tensors still in use, any shape, into arguments from index `start` on; returns them."""
        arguments = self._graph.find_nodes(op="placeholder")
        used = [node for node in self._graph.nodes if node in self._values]
        by_tensor: dict[int, Node] = {}
        tensors: list[torch.Tensor] = []
        for node in used:
            value = self._values[node]
            if id(value) not in by_tensor:
                with self._before(arguments, start):
                    argument = self._graph.placeholder(f"constant_{len(tensors)}")
                argument.meta = dict(node.meta)
                by_tensor[id(value)] = argument
                tensors.append(value)
            replace(node, by_tensor[id(value)])
        return tensors

    def _before(self, arguments: list[Node], start: int) -> Any:
        if start < len(arguments):
            return self._graph.inserting_before(arguments[start])
        return self._graph.inserting_after(arguments[-1])
