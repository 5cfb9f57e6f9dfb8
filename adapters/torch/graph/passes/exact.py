"""Passes over recorded operations that change no bit: what does nothing, or is known beforehand, goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.graph.passes.nodes import aten, is_only_used_by

_LIBRARY = torch.library.Library("isotrain", "DEF")
_LIBRARY.define("seed(Tensor value, int generator) -> Tensor")
_LIBRARY.impl("seed", lambda value, generator: value.clone(), "CompositeExplicitAutograd")
"""Where a seed is drawn, for a generator of this number."""
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.contiguous.default}
_LIFTED = {aten.lift_fresh_copy.default, aten.lift_fresh.default}
_COPIES = {*_LIFTED, aten.detach_.default}
_CHOICES = {aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther}
_SMALL = 4096
"""Numbers in a constant that is computed while recording rather than in every step."""


def simplify(
    module: GraphModule, variables: int, generators: Sequence[torch.Generator]
) -> list[torch.Tensor]:
    """Simplifies a record in place.

    Args:
        module: As it was traced; its tensors become arguments of its graph.
        variables: How many of its arguments come first; the tensors follow these.
        generators: Those that the record seeds.

    Returns:
        The tensors, in the order of the arguments.
    """
    graph = module.graph
    _seed_generators(module, generators)
    _drop_casts(graph)
    constants = _Constants(module)
    constants.fold()
    constants.choose()
    drop_unused(graph)
    tensors = constants.as_arguments(variables)
    graph.lint()
    module.recompile()
    return tensors


def _seed_generators(module: GraphModule, generators: Sequence[torch.Generator]) -> None:
    """Lets the places where seeds were drawn seed the record's generators."""
    for index, generator in enumerate(generators):
        setattr(module, f"generator_{index}", generator)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.isotrain.seed.default):
        value, index = node.args
        with module.graph.inserting_before(node):
            generator = module.graph.create_node("get_attr", f"generator_{index}")
            module.graph.call_function(_seed, (generator, value))
        module.graph.erase_node(node)


def _seed(generator: torch.Generator, value: torch.Tensor) -> None:
    """As Keras makes a generator of a drawn seed."""
    generator.manual_seed(int(value) & 0xFFFFFFFF)


def meta(node: Node) -> Any:
    """Shape, dtype and strides of what an operation gives; None where it is no tensor."""
    return node.meta.get("tensor_meta")


def _drop_casts(graph: Graph) -> None:
    """Removes conversions to what a tensor already is."""
    for node in list(graph.nodes):
        if node.target in _CASTS and _gives_its_argument(node):
            replace(node, node.args[0])


def _gives_its_argument(node: Node) -> bool:
    source = node.args[0]
    before, after = meta(source), meta(node)
    if before is None or after is None or "copy" in node.kwargs or len(node.args) > 3:
        return False
    same_device = source.meta["val"].device == node.meta["val"].device
    return same_device and (before.dtype, before.stride, before.shape) == (
        after.dtype,
        after.stride,
        after.shape,
    )


def replace(node: Node, other: Node) -> None:
    """Lets everybody use another node, and removes this one."""
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def is_pure(node: Node) -> bool:
    """Whether an operation only gives a result, the same one each time."""
    schema = private_api.schema_of(node.target)
    if node.op != "call_function" or schema is None:
        return False
    return not schema.is_mutable and not draws(node)


def draws(node: Node) -> bool:
    """Whether an operation draws random numbers, or stands for a generator of them."""
    tags = getattr(node.target, "tags", ())
    return node.op == "get_attr" or torch.Tag.nondeterministic_seeded in tags


def drop_unused(graph: Graph) -> None:
    """Removes operations whose results nobody uses."""
    for node in reversed(list(graph.nodes)):
        if not node.users and (is_pure(node) or node.op == "get_attr"):
            graph.erase_node(node)


def _aliases(node: Node) -> bool:
    """Whether an operation changes its arguments, or gives a view of one."""
    schema = private_api.schema_of(node.target)
    return schema is None or any(a.alias_info is not None for a in schema.arguments)


def _is_literal(node: Node) -> bool:
    """Whether a tensor was made of numbers in Python while it was recorded, and nobody else has it."""
    return all(user.target in _LIFTED for user in node.users)


class _Constants:
    """The tensors that a record holds, and what can be computed from them alone."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._graph = module.graph
        self._values: dict[Node, torch.Tensor] = {
            node: value
            for node in self._graph.find_nodes(op="get_attr")
            if isinstance(value := getattr(module, node.target), torch.Tensor)
        }
        self._known = {node: v for node, v in self._values.items() if _is_literal(node)}

    def fold(self) -> None:
        """Computes what depends on literals alone: tensors that somebody made may change afterwards."""
        known = dict(self._known)
        candidates = self._candidates(known)
        for node in list(self._graph.nodes):
            if node in candidates:
                known[node] = self._computed(node, known)
        for node in candidates:
            if any(user not in candidates for user in node.users):
                self._snapshot_guard(node, known[node])

    def _candidates(self, known: Iterable[Node]) -> set[Node]:
        """Operations on constants, as many as are used by no view or change that remains."""
        found = set(known)
        for node in self._graph.nodes:
            if self._can_be_known(node, found):
                found.add(node)
        found -= set(known)
        while unsafe := {node for node in found if self._is_exposed(node, found)}:
            found -= unsafe
            found = {node for node in found if not unsafe & set(node.all_input_nodes)}
        return found

    @staticmethod
    def _is_exposed(node: Node, found: set[Node]) -> bool:
        """Whether somebody who stays sees the very tensor, and may change it."""
        return any(
            user.op == "call_function" and user not in found and _aliases(user)
            for user in node.users
        )

    @staticmethod
    def _can_be_known(node: Node, found: set[Node]) -> bool:
        if not (is_pure(node) or node.target in _COPIES) or meta(node) is None:
            return False
        small = meta(node).shape.numel() <= _SMALL
        return small and all(source in found for source in node.all_input_nodes)

    @staticmethod
    def _computed(node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
        with torch.no_grad():
            if node.target in _COPIES:
                return args[0].clone()
            return node.target(*args, **kwargs)

    def _snapshot_guard(self, node: Node, value: torch.Tensor) -> None:
        """Makes a known result a tensor of the record."""
        name = f"known_{len(self._values)}"
        setattr(self._module, name, value)
        with self._graph.inserting_before(node):
            held = self._graph.create_node("get_attr", name)
        held.meta = dict(node.meta)
        self._values[held] = self._known[held] = value
        node.replace_all_uses_with(held)

    def choose(self) -> None:
        """Takes, where what is known leaves no choice between a tensor and a constant, the tensor."""
        for node in list(self._graph.nodes):
            if node.target in _CHOICES and (chosen := self._chosen(node)) is not None:
                replace(node, chosen)

    def _chosen(self, node: Node) -> Node | None:
        """A tensor that nobody else sees, and nothing that has gradients is dropped."""
        condition, *both = node.args
        known = self._known.get(condition)
        if known is None or bool(known.any()) != bool(known.all()):
            return None
        chosen, dropped = both if bool(known.all()) else reversed(both)
        if not is_only_used_by(chosen, node) or not is_pure(chosen) or _aliases(chosen):
            return None
        if isinstance(dropped, Node) and dropped not in self._known:
            return None
        ours, theirs = meta(node), meta(chosen)
        same = (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        return chosen if same else None

    def as_arguments(self, start: int) -> list[torch.Tensor]:
        """Makes the tensors that are still used arguments of the graph, and gives them."""
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
