"""Pass that draws random numbers by sample together: each draw by itself takes some hundred operations."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from isotrain.adapters.torch.base.sample_draws import CHUNK


def merge_draws(graph: Graph) -> None:
    """Replaces draws of integers by sample by common ones of at most `CHUNK` counters; changes no bit."""
    group: list[Node] = []
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.isotrain_random.integers.default
    ):
        _, _, rows, _, by_sample = node.args
        if not by_sample:
            continue
        counters = rows * sum(each.args[3] for each in (*group, node))
        if group and (counters > CHUNK or group[0].args[2] != rows):
            _merge(group)
            group = []
        group.append(node)
    _merge(group)


def _merge(draws: Sequence[Node]) -> None:
    """Replaces draws, which have the same position, by one operation before the first of them."""
    if len(draws) < 2:
        return
    graph, (position, _, rows, _, by_sample) = draws[0].graph, draws[0].args
    keys = [word for node in draws for word in node.args[1]]
    blocks = [node.args[3] for node in draws]
    with graph.inserting_before(draws[0]):
        together = graph.call_function(
            torch.ops.isotrain_random.integers_of_draws.default,
            (position, keys, rows, blocks, by_sample),
        )
    for index, node in enumerate(draws):
        with graph.inserting_before(node):
            one = graph.call_function(operator.getitem, (together, index))
        one.meta = dict(node.meta)
        node.replace_all_uses_with(one)
        graph.erase_node(node)
