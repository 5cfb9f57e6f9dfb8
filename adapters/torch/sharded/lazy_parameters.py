"""Lazy parameters: sharded weights of a torch module, gathered when any operation takes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.sharded.saved_tensors import GatheredReads
from isotrain.adapters.torch.sharded.weights import ShardedWeights
from isotrain.plugin import SpecError, map_tree

_METADATA_FUNCTIONS = frozenset(
    {
        *("dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"),
        *(
            "numel",
            "size",
            "stride",
            "storage_offset",
            "untyped_storage",
            "__len__",
            "is_same_size",
        ),
        *("register_hook", "register_post_accumulate_grad_hook"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    }
)
"""Functions that do not read the data of a parameter."""
_DATA_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that do read its data."""
_AUTOCAST_FUNCTIONS = frozenset(
    {
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"),
        *(f"conv{kind}{axes}d" for kind in ("", "_transpose") for axes in (1, 2, 3)),
    }
)
"""Functions that autocast runs in the lower precision: their weights are gathered in its dtype."""


class LazyParameters:
    """Makes parameters without data usable in torch operations: each use gathers the data.

    Within `forward` and `backward`, the class of the parameters is replaced by one with a
    `__torch_function__`.
    """

    def __init__(self, weights: ShardedWeights) -> None:
        """Prepares the class; the parameters stay as they are.

        Args:
            weights: Sharded weights, which have the parameters.
        """
        self._weights = weights
        self._indices = {id(each): index for index, each in enumerate(weights.parameters)}
        self._original_classes = [type(each) for each in weights.parameters]
        self._lazy_class = _lazy_parameter_class(self)
        self._reads: GatheredReads | None = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context for a forward pass, which saves no weights for the backward pass."""
        reads = GatheredReads(self._weights)
        with reads.without_saving_weights(), self._replacing_classes(reads):
            yield

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Context for a backward pass, which may recompute modules (activation checkpointing)."""
        return self._replacing_classes(GatheredReads(self._weights))

    @contextlib.contextmanager
    def _replacing_classes(self, reads: GatheredReads) -> Iterator[None]:
        parameters, self._reads = self._weights.parameters, reads
        for parameter in parameters:
            parameter.__class__ = self._lazy_class
        try:
            yield
        finally:
            self._reads = None
            for parameter, original in zip(parameters, self._original_classes, strict=True):
                parameter.__class__ = original

    @property
    def is_gathering(self) -> bool:
        """Whether operations are given gathered data; not while `read` itself gathers some."""
        return self._reads is not None

    def read(self, parameter: nn.Parameter, autocast: bool) -> torch.Tensor:
        """Gathers the data of a parameter, in its shape.

        Args:
            parameter: Lazy parameter.
            autocast: Whether to return it in the autocast dtype, where autocast is enabled.
        """
        reads, self._reads = self._reads, None
        assert reads is not None, "operations that gather weights do not read lazy parameters"
        try:
            dtype, device = parameter.dtype, parameter.device.type
            if autocast and torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
            return reads.read(self._indices[id(parameter)], dtype)
        finally:
            self._reads = reads


def _lazy_parameter_class(lazy_parameters: LazyParameters) -> type[nn.Parameter]:
    """Makes the class of parameters, of any shape, whose data is gathered when a function takes them."""

    class LazyParameter(nn.Parameter):
        """Parameter without data; see `LazyParameters`."""

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if not lazy_parameters.is_gathering:
                return nn.Parameter.__torch_function__(function, types, args, kwargs)
            name, attribute = function.__name__, _attribute(function)
            if attribute == "data":
                return _data(name, lazy_parameters.read(args[0], autocast=False))
            if name in _METADATA_FUNCTIONS or (attribute and attribute not in _DATA_ATTRIBUTES):
                return nn.Parameter.__torch_function__(function, types, args, kwargs)

            def gather(value: Any) -> Any:
                is_lazy = type(value) is cls
                return (
                    lazy_parameters.read(value, name in _AUTOCAST_FUNCTIONS) if is_lazy else value
                )

            args, kwargs = map_tree(gather, (args, kwargs), lists=True)
            return function(*args, **kwargs)

    return LazyParameter


def _attribute(function: Any) -> str:
    """Name of the attribute that a function gets or sets; empty for other functions."""
    is_accessor = function.__name__ in ("__get__", "__set__")
    return getattr(function.__self__, "__name__", "other") if is_accessor else ""


def _data(name: str, gathered: torch.Tensor) -> torch.Tensor:
    """Value of the attribute `data`, in the weight's shape.

    Raises:
        SpecError: The attribute is set.

    In-place changes of it are detected by its version counter.
    """
    if name == "__set__":
        raise SpecError(
            "strategy sharded: the data of a parameter is set in a forward pass, and with stage=3 no replica"
            " has all of it. Use stage 1 or 2."
        )
    return gathered.detach()
