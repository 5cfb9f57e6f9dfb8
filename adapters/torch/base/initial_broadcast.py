"""Broadcast of initial tensors from replica 0, byte by byte, for all dtypes and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.tensors import unexpanded
from isotrain.plugin import SpecError

BroadcastFirst = Callable[[torch.Tensor], object]
"""Broadcast from replica 0 of a contiguous uint8 vector, in place. Collective, with equal lengths."""
_MAX_BYTES = 1 << 26
"""Size in bytes from which tensors are broadcast in several messages."""
_COMPONENTS: Mapping[torch.layout, Sequence[str]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""Methods that return the dense component tensors of a sparse layout."""


def broadcast_initial_values(
    tensors: Mapping[str, torch.Tensor], device: torch.device, send: BroadcastFirst
) -> None:
    """Overwrites tensors in place by those of replica 0. Collective.

    Args:
        tensors: Tensors by name, with the same names, dtypes and shapes, in the same order, on all ranks.
        device: Device of the tensors.
        send: Broadcast from replica 0.

    Raises:
        SpecError: Names, dtypes or shapes differ from replica 0's.
    """
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            parts = enumerate(dense(tensor.detach()))
            named |= {f"{name} ({part.dtype}, {list(part.shape)}, {n})": part for n, part in parts}
    _require_equal_descriptions(list(named), device, send)
    bundle: list[torch.Tensor] = []
    size = 0
    for part in named.values():
        bundle.append(part)
        size += part.nbytes
        if size > _MAX_BYTES:
            broadcast_bundle(bundle, send)
            bundle, size = [], 0
    if bundle:
        broadcast_bundle(bundle, send)


def dense(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Dense tensors that share a tensor's memory, without the repetitions of expanded axes; any shape."""
    if tensor.layout in _COMPONENTS:
        yield from (getattr(tensor, name)() for name in _COMPONENTS[tensor.layout])
        return
    yield unexpanded(tensor)


def _require_equal_descriptions(
    local: Sequence[str], device: torch.device, send: BroadcastFirst
) -> None:
    """Compares descriptions of tensors with those of replica 0. Collective.

    Raises:
        SpecError: They differ.
    """

    def broadcast(content: bytes) -> bytes:
        vector = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        send(vector)
        return bytes(vector.tolist())

    text = "\n".join(local).encode()
    length = int.from_bytes(broadcast(len(text).to_bytes(8)))
    first = broadcast(text[:length].ljust(length))
    if first == text:
        return
    pairs = zip_longest(local, first.decode().split("\n"), fillvalue="nothing more")
    ours, theirs = next((ours, theirs) for ours, theirs in pairs if ours != theirs)
    raise SpecError(
        f"model: a replica built {ours} where replica 0 has {theirs}. The model function must return weights"
        " of the same names, dtypes and shapes on every replica."
    )


def broadcast_bundle(tensors: Sequence[torch.Tensor], send: BroadcastFirst) -> None:
    """Broadcasts tensors of any dtype from replica 0 as one vector of bytes, in place. Collective."""
    values = [each.resolve_conj().resolve_neg().contiguous() for each in tensors]
    vectors = [v.as_strided((v.numel(),), (1,)).view(torch.uint8) for v in values]
    vector = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
    for message in vector.split(_MAX_BYTES):
        send(message)
    with torch.no_grad():
        received = vector.split([len(each) for each in vectors])
        for each, first in zip(vectors, received, strict=True):
            if len(vectors) > 1:
                each.copy_(first)
        for tensor, value in zip(tensors, values, strict=True):
            if private_api.storage_of(value) != private_api.storage_of(tensor):
                tensor.copy_(value)
