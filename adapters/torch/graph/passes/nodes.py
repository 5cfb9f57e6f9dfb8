"""Helpers of passes over fx graphs of aten operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten


def call(graph: Graph, like: Node, target: Any, args: Sequence[Any]) -> Node:
    """Adds a call to the graph, with the metadata of another node's result."""
    node = graph.call_function(target, tuple(args))
    node.meta = dict(like.meta)
    return node


def is_only_used_by(node: Any, user: Node) -> bool:
    """Whether `user` is the only user of a node."""
    return isinstance(node, Node) and list(node.users) == [user]


def is_call(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these operations."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Shape of a node's result; None if it is not a tensor."""
    meta = node.meta.get("tensor_meta") if isinstance(node, Node) else None
    return None if meta is None else tuple(meta.shape)


def dtype_of(node: Node) -> torch.dtype:
    """Dtype of a node's result."""
    dtype: torch.dtype = node.meta["tensor_meta"].dtype
    return dtype


def is_on_cpu(node: Node) -> bool:
    """Whether a node's result is on a CPU."""
    return bool(node.meta["val"].device.type == "cpu")


def with_shape(node: Node, shape: Sequence[int]) -> Node:
    """Sets the result shape in a node's metadata, and returns the node."""
    meta = node.meta["tensor_meta"]
    node.meta["tensor_meta"] = meta._replace(shape=torch.Size(shape))
    return node
