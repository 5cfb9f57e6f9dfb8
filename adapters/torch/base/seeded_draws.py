"""Random numbers that operations of torch draw from its generators."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isotrain.adapters.common.sample_draws import REFUSAL, REFUSAL_WITH_REPRODUCIBLE
from isotrain.adapters.torch.base import private_api
from isotrain.plugin import SpecError, active_draws

_SWITCHES = ("dropout_p", "dropout", "train", "training")
"""Arguments of operations that draw nothing where one of them is zero or false."""


class RefusingSeededDraws(TorchDispatchMode):
    """Context in which this thread draws no random numbers from generators of torch.

    Other threads may, as one that reads samples. In a pass that draws by sample, so may what runs under
    `active(None)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_sample = active_draws.get() is not None

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        is_allowed = self._by_sample and active_draws.get() is None
        if torch.Tag.nondeterministic_seeded in function.tags and not is_allowed:
            parameters = private_api.schema_of(function).arguments
            values = {each.name: each.default_value for each in parameters}
            values |= zip((each.name for each in parameters), arguments, strict=False)
            values |= options
            if 0 not in map(values.get, _SWITCHES):
                refusal = REFUSAL if self._by_sample else REFUSAL_WITH_REPRODUCIBLE
                operation = f"the operation {function} of the model or the objective"
                raise SpecError(refusal.format(operation))
        return function(*arguments, **options)
