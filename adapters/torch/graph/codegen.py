"""Execution of a graph by torch's Python functions, whose calls take half as long as those of `torch.ops`.

Both reach the same kernels; they differ in how Python arguments are parsed. Operations that reach their
kernel by a detour are replaced by those that call it with the same operands. So no bit depends on this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.nn import functional

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.binary_cross_entropy import binary_cross_entropy
from isotrain.adapters.torch.graph.passes.exact import drop_unused
from isotrain.adapters.torch.graph.passes.loss import skip_class_casts
from isotrain.adapters.torch.graph.passes.matmul_conv import einsum_as_bmm
from isotrain.adapters.torch.graph.passes.nodes import aten

_MEAN = 1
"""Reduction by the mean, as torch numbers it."""


def _cross_entropy_loss(
    scores: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
    *others: Any,
) -> torch.Tensor:
    """Cross-entropy with the operation's default reduction; that of torch's function is another one."""
    return private_api.cross_entropy_loss(scores, targets, weight, reduction, *others)


FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    aten.abs.default: torch.abs,
    aten.add.Tensor: torch.add,
    aten.add_.Tensor: torch.Tensor.add_,
    aten.addmm.default: torch.addmm,
    aten.avg_pool2d.default: functional.avg_pool2d,
    aten.batch_norm.default: torch.batch_norm,
    aten.binary_cross_entropy.default: binary_cross_entropy,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clamp.default: torch.clamp,
    aten.constant_pad_nd.default: torch.constant_pad_nd,
    aten.contiguous.default: torch.Tensor.contiguous,
    aten.conv1d.default: torch.conv1d,
    aten.conv2d.default: torch.conv2d,
    aten.conv3d.default: torch.conv3d,
    aten.cross_entropy_loss.default: _cross_entropy_loss,
    aten.detach.default: torch.Tensor.detach,
    aten.div.Tensor: torch.div,
    aten.divide.Tensor: torch.divide,
    aten.embedding.default: torch.embedding,
    aten.eq.Tensor: torch.eq,
    aten.exp.default: torch.exp,
    aten.expand.default: torch.Tensor.expand,
    aten.gelu.default: functional.gelu,
    aten.layer_norm.default: torch.layer_norm,
    aten.log.default: torch.log,
    aten.matmul.default: torch.matmul,
    aten.max_pool2d.default: torch.max_pool2d,
    aten.mean.default: torch.mean,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.mul_.Tensor: torch.Tensor.mul_,
    aten.multiply.Tensor: torch.multiply,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
    aten.sigmoid.default: torch.sigmoid,
    aten.sqrt.default: torch.sqrt,
    aten.square.default: torch.square,
    aten.squeeze.dim: torch.squeeze,
    aten.sub.Tensor: torch.sub,
    aten.subtract.Tensor: torch.subtract,
    aten.sum.default: torch.sum,
    aten.sum.dim_IntList: torch.sum,
    aten.tanh.default: torch.tanh,
    aten.to.dtype: torch.Tensor.to,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
    aten.where.self: torch.where,
}
"""Function with the same arguments in the same order, for each operation that models are mostly made of."""
_DETOURS = (einsum_as_bmm, skip_class_casts)


def shortened(module: GraphModule) -> Graph:
    """Copy of a traced graph whose operations reach the same kernels without detours; changes no bit."""
    graph = copy.deepcopy(module.graph)
    for node in list(graph.nodes):
        any(each(node) for each in _DETOURS)
    drop_unused(graph)
    return graph


def compile_direct_calls(module: GraphModule) -> Callable[..., Any]:
    """Function that executes a traced graph by `FUNCTIONS`, with the same bits."""
    graph = shortened(module)
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = FUNCTIONS.get(node.target, node.target)
    forward: Callable[..., Any] = GraphModule(module, graph).forward
    return forward
