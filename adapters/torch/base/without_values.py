"""Large tensors that have a shape and no values, so that any machine can plan a model of any size."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isotrain.adapters.torch.base import private_api
from isotrain.adapters.torch.base.pytree import leaves

_LARGE_BYTES = 2**20
"""Size in bytes from which a new tensor has no values: smaller ones, such as rates and seeds, are read."""


class WithoutValues(TorchDispatchMode):
    """Context in which new large tensors have no values, nor has what is computed of them.

    They take no memory, and operations on them take no time. Reading a value of one raises an error of torch.
    Tensors that are made of values, as by `torch.tensor` or `from_numpy`, keep them.

    Attributes:
        is_entered: Whether this process is in such a context.
    """

    is_entered = False

    def __enter__(self) -> Self:
        type(self).is_entered = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        type(self).is_entered = False
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if any(isinstance(each, torch.Tensor) for each in leaves((arguments, options))):
            return function(*arguments, **options)
        with private_api.fake_tensors():
            result = function(*arguments, **options)
        is_large = isinstance(result, torch.Tensor) and result.nbytes >= _LARGE_BYTES
        return result if is_large else function(*arguments, **options)
