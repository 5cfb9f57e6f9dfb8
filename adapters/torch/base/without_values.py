"""Large tensors that have a shape and no values, so that any machine can plan a model of any size."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.pytree import filled, leaves

_LARGE_BYTES = 2**20
"""Size in bytes from which a new tensor has no values: smaller ones, such as rates and seeds, are read."""

_READERS = {
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__),
    *(torch.Tensor.__format__, torch.Tensor.__index__, torch.Tensor.__reduce_ex__),
}
"""Functions that read values without an operation of torch."""
_MEMORY_USERS = {torch.Tensor.data_ptr, torch.Tensor.apply_, torch.Tensor.map_}
"""Functions that take memory which is there: its address, or each of its elements."""
COLLECTIVES: dict[str, Callable[..., torch.Tensor]] = {}
"""Functions in place of collective operations, by name: torch calls none with tensors that lack values."""


class MissingValueError(Exception):
    """Something takes values that are not there, in the context `WithoutValues`."""


class _Readers(TorchFunctionMode):
    """Context in which reading a small tensor that lacks its values raises an error, as of a large one."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function in _READERS and lacks_values(arguments[0]):
            arguments[0].sum().item()  # raises the error of torch
        if function in _MEMORY_USERS and lacks_values(arguments[0]):
            raise MissingValueError(f"{function.__name__} takes memory")
        return function(*arguments, **(options or {}))


class WithoutValues(TorchDispatchMode):
    """Context in which new large tensors have no values, nor has what is computed of them.

    They take no memory, and operations on them take no time. Reading a value of one raises an error of torch.
    Tensors that are made of values, as by `torch.tensor` or `from_numpy`, keep them until something without
    values is written into them, as by `+=`, `copy_` or `out=`.

    Attributes:
        entered: The context that this process is in; None outside.
    """

    entered: WithoutValues | None = None

    def __init__(self) -> None:
        super().__init__()
        self._readers = _Readers()
        self._overwritten: set[Hashable] = set()
        """Storages of small tensors into which something without values was written."""

    def __enter__(self) -> Self:
        WithoutValues.entered = self
        self._readers.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        WithoutValues.entered = None
        self._readers.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if private_api.is_in_fake_tensors():  # of DTensors, which have one of their own
            return function(*arguments, **options)
        tensors = [*leaves((arguments, options))]
        if any(map(private_api.is_wrapper, tensors)):
            return NotImplemented  # what it does with its inner tensors comes here
        if tensors:
            if any(map(self.lacks_values, tensors)):
                return self._called_without_values(function, arguments, options)
            return function(*arguments, **options)
        with private_api.fake_tensors():
            result = function(*arguments, **options)
        is_large = isinstance(result, torch.Tensor) and result.nbytes >= _LARGE_BYTES
        return result if is_large else function(*arguments, **options)

    def lacks_values(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, of any shape, has no values, or others than it would have outside the context."""
        if private_api.is_fake(tensor):
            return True
        if not self._overwritten or tensor.layout != torch.strided:
            return False
        return private_api.storage_of(tensor) in self._overwritten

    def _called_without_values(self, function: Any, arguments: Any, options: Any) -> Any:
        """Result of an operation of which an argument lacks values."""
        schema = private_api.schema_of(function)
        written = list(leaves(private_api.written_arguments(function, arguments, options)))
        if private_api.changes_memory(function):
            others = any(map(private_api.is_fake, leaves((arguments, options))))
            if others and not any(map(private_api.is_fake, written)):
                raise MissingValueError(
                    f"{function} gives a tensor with values the memory of another"
                )
        for tensor in written:
            if not private_api.is_fake(tensor) and tensor.layout == torch.strided:
                self._overwritten.add(private_api.storage_of(tensor))
        is_view = schema is not None and any(each.alias_info for each in schema.arguments)
        if written or is_view:  # also of the memory of small tensors
            return function(*arguments, **options)
        with private_api.fake_tensors() as mode:

            def fake(tensor: torch.Tensor) -> torch.Tensor:
                """The tensor without values, in its shape, if it lacks them."""
                is_overwritten = self.lacks_values(tensor) and not private_api.is_fake(tensor)
                return mode.from_tensor(tensor) if is_overwritten else tensor

            tree = (arguments, options)
            arguments, options = filled(tree, map(fake, leaves(tree)))
            if (collective := private_api.collective_name(function)) is None:
                return function(*arguments, **options)
            if collective not in COLLECTIVES:
                raise MissingValueError(f"the collective {function} takes values")
            return COLLECTIVES[collective](*arguments, **options)


def lacks_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor, of any shape, has no values that may be read, as in the context `WithoutValues`."""
    if WithoutValues.entered is None:
        return private_api.is_fake(tensor)
    return WithoutValues.entered.lacks_values(tensor)


def is_missing_value(error: BaseException) -> bool:
    """Whether an error says that a tensor without values has none, or that something takes no such tensor.

    An operation that refuses their shapes raises another one.
    """
    return isinstance(error, (MissingValueError, *private_api.missing_value_errors()))
