"""Parameters of a torch module that are joined when an operation takes them, whoever reads them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.sharded.saved_tensors import GatheredReads
from isotrain.adapters.torch.sharded.weights import ShardedWeights
from isotrain.plugin import SpecError, map_tree

_ABOUT = frozenset(
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
"""Functions that read no numbers of a parameter."""
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Attributes that do."""
_ROUNDED = frozenset(
    {
        *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"),
        *(f"conv{kind}{axes}d" for kind in ("", "_transpose") for axes in (1, 2, 3)),
    }
)
"""Functions that take numbers in the type of mixed precision, which are then those that are not kept."""


class LazyParameters:
    """Has parameters without numbers dealt with as if they had them."""

    def __init__(self, weights: ShardedWeights) -> None:
        """Leaves them as they are for now.

        Args:
            weights: Whose parameters they are.
        """
        self._weights = weights
        self._places = {id(each): place for place, each in enumerate(weights.parameters)}
        self._kinds = [type(each) for each in weights.parameters]
        self._kind = _kind_that_reads(self)
        self._reads: GatheredReads | None = None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Within it is a forward pass, which keeps no weights for the backward pass."""
        reads = GatheredReads(self._weights)
        with reads.without_saving_weights(), self._replacing_classes(reads):
            yield

    def backward(self) -> contextlib.AbstractContextManager[None]:
        """Within it is a backward pass, which may compute modules again."""
        return self._replacing_classes(GatheredReads(self._weights))

    @contextlib.contextmanager
    def _replacing_classes(self, reads: GatheredReads) -> Iterator[None]:
        parameters, self._reads = self._weights.parameters, reads
        for parameter in parameters:
            parameter.__class__ = self._kind
        try:
            yield
        finally:
            self._reads = None
            for parameter, kind in zip(parameters, self._kinds, strict=True):
                parameter.__class__ = kind

    @property
    def are_read(self) -> bool:
        """Whether a function that takes a parameter is to have its numbers: not one that joins them."""
        return self._reads is not None

    def read(self, parameter: nn.Parameter, rounded: bool) -> torch.Tensor:
        """A parameter's numbers.

        Args:
            parameter: One of these.
            rounded: Whether they are used in the type of mixed precision, where there is one.
        """
        reads, self._reads = self._reads, None
        assert reads is not None, "they are read by functions that do not join them"
        try:
            dtype, device = parameter.dtype, parameter.device.type
            if rounded and torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
            return reads.read(self._places[id(parameter)], dtype)
        finally:
            self._reads = reads


def _kind_that_reads(lazy_parameters: LazyParameters) -> type[nn.Parameter]:
    """Makes the class of parameters that are read when a function of torch takes them."""

    class Absent(nn.Parameter):
        """A parameter whose numbers are elsewhere."""

        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if not lazy_parameters.are_read:
                return nn.Parameter.__torch_function__(function, types, args, kwargs)
            name, attribute = function.__name__, _attribute(function)
            if attribute == "data":
                return _data(name, lazy_parameters.read(args[0], rounded=False))
            if name in _ABOUT or (attribute and attribute not in _VIEWS):
                return nn.Parameter.__torch_function__(function, types, args, kwargs)

            def given(value: Any) -> Any:
                is_absent = type(value) is cls
                return lazy_parameters.read(value, name in _ROUNDED) if is_absent else value

            args, kwargs = map_tree(given, (args, kwargs), lists=True)
            return function(*args, **kwargs)

    return Absent


def _attribute(function: Any) -> str:
    """The name of the attribute that a function gives or sets; nothing of other functions."""
    is_accessor = function.__name__ in ("__get__", "__set__")
    return getattr(function.__self__, "__name__", "other") if is_accessor else ""


def _data(name: str, whole: torch.Tensor) -> torch.Tensor:
    """What `data` is, of which a change is seen.

    Raises:
        SpecError: It is set.
    """
    if name == "__set__":
        raise SpecError(
            "strategy sharded: the data of a parameter is set in a forward pass, and with stage=3 no replica"
            " has all of it. Take stage 1 or 2."
        )
    return whole.detach()
