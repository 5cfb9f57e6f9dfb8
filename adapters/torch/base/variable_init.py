"""What the tensors of a model hold at first: the bytes of replica 0's, whatever their types and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch

from isotrain.adapters.torch.base.tensors import unexpanded
from isotrain.plugin import SpecError

BroadcastFirst = Callable[[torch.Tensor], object]
"""Overwrites a contiguous vector of bytes by replica 0's. Called by all with vectors of equal length."""
_MOST_BYTES = 1 << 26
_SPARSE: Mapping[torch.layout, Sequence[str]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that give the dense tensors in which the numbers of others lie."""


def broadcast_initial_values(
    tensors: Mapping[str, torch.Tensor], device: torch.device, send: BroadcastFirst
) -> None:
    """Gives tensors the values of replica 0, in the memory that they have. Called by every process.

    Args:
        tensors: By name: of every process the same names, types and shapes, in the same order.
        device: Where they lie.
        send: Brings the values here.

    Raises:
        SpecError: Replica 0 has other tensors.
    """
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            parts = enumerate(dense(tensor.detach()))
            named |= {f"{name} ({part.dtype}, {list(part.shape)}, {n})": part for n, part in parts}
    _require_alike(list(named), device, send)
    bundle: list[torch.Tensor] = []
    size = 0
    for part in named.values():
        bundle.append(part)
        size += part.nbytes
        if size > _MOST_BYTES:
            broadcast_bundle(bundle, send)
            bundle, size = [], 0
    if bundle:
        broadcast_bundle(bundle, send)


def dense(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Dense tensors in the memory of one, which has none of their numbers twice."""
    if tensor.layout in _SPARSE:
        yield from (getattr(tensor, name)() for name in _SPARSE[tensor.layout])
        return
    yield unexpanded(tensor)


def _require_alike(own: Sequence[str], device: torch.device, send: BroadcastFirst) -> None:
    """Compares descriptions with those of replica 0.

    Raises:
        SpecError: They differ.
    """

    def sent(given: bytes) -> bytes:
        vector = torch.frombuffer(bytearray(given), dtype=torch.uint8).to(device)
        send(vector)
        return bytes(vector.tolist())

    text = "\n".join(own).encode()
    length = int.from_bytes(sent(len(text).to_bytes(8)))
    first = sent(text[:length].ljust(length))
    if first == text:
        return
    pairs = zip_longest(own, first.decode().split("\n"), fillvalue="nothing more")
    ours, theirs = next((ours, theirs) for ours, theirs in pairs if ours != theirs)
    raise SpecError(
        f"model: a replica built {ours} where replica 0 has {theirs}. The model function must give every"
        " replica weights of the same names, types and shapes."
    )


def broadcast_bundle(tensors: Sequence[torch.Tensor], send: BroadcastFirst) -> None:
    """Sends tensors together, many bytes in several messages."""
    values = [each.resolve_conj().resolve_neg().contiguous() for each in tensors]
    own = [v.as_strided((v.numel(),), (1,)).view(torch.uint8) for v in values]
    vector = own[0] if len(own) == 1 else torch.cat(own)
    for message in vector.split(_MOST_BYTES):
        send(message)
    with torch.no_grad():
        for each, first in zip(own, vector.split([len(each) for each in own]), strict=True):
            if len(own) > 1:
                each.copy_(first)
        for tensor, value in zip(tensors, values, strict=True):
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)
