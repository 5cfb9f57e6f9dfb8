"""Random numbers that operations of torch draw from its process-wide generators."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isotrain.adapters.torch.base import private_api
from isotrain.plugin import SpecError

_SWITCHES = ("dropout_p", "dropout", "train", "training")
"""Arguments of operations that draw nothing where one of them is zero or false."""


class RefusingSeededDraws(TorchDispatchMode):
    """Context in which this thread draws no random numbers from process-wide generators.

    Other threads may, as one that reads samples.
    """

    def __init__(self, refusal: str) -> None:
        """Takes the message of the error; what draws is filled in."""
        super().__init__()
        self._refusal = refusal

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if torch.Tag.nondeterministic_seeded in function.tags:
            parameters = private_api.schema_of(function).arguments
            values = {each.name: each.default_value for each in parameters}
            values |= zip((each.name for each in parameters), arguments, strict=False)
            values |= options
            if values.get("generator") is None and 0 not in map(values.get, _SWITCHES):
                operation = f"the operation {function} of the model or the objective"
                raise SpecError(self._refusal.format(operation))
        return function(*arguments, **options)
