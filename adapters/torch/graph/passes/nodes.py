"""What passes over recorded operations have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def call(graph: Graph, like: Node, target: Any, args: Sequence[Any]) -> Node:
    """An operation whose result is of the kind that another one gave."""
    node = graph.call_function(target, tuple(args))
    node.meta = dict(like.meta)
    return node


def is_only_used_by(node: Any, user: Node) -> bool:
    """Whether nobody else needs what an operation gives."""
    return isinstance(node, Node) and list(node.users) == [user]


def is_call(node: Any, *targets: Any) -> bool:
    """Whether it is one of these operations."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of what an operation gives; None where it is no tensor."""
    known = node.meta.get("tensor_meta") if isinstance(node, Node) else None
    return None if known is None else tuple(known.shape)


def dtype_of(node: Node) -> torch.dtype:
    """The type of the numbers in a tensor."""
    found: torch.dtype = node.meta["tensor_meta"].dtype
    return found


def is_on_cpu(node: Node) -> bool:
    """Whether a CPU computes it."""
    return bool(node.meta["val"].device.type == "cpu")


def shaped(node: Node, shape: Sequence[int]) -> Node:
    """The same operation, of which it is noted that its result has this shape."""
    known = node.meta["tensor_meta"]
    node.meta["tensor_meta"] = known._replace(shape=torch.Size(shape))
    return node
