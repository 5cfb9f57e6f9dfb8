"""The momentum of a torch optimizer's parameter groups."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("name", "options", "key", "expected"),
    [
        ("SGD", {"momentum": 0.9}, "momentum", 0.5),
        ("RMSprop", {"momentum": 0.9}, "momentum", 0.5),
        ("AdamW", {}, "betas", (0.5, 0.999)),
        ("SGD", {}, "momentum", None),
        ("Adagrad", {}, "lr", None),
    ],
)
def test_it_is_set_in_all_groups(
    name: str, options: dict[str, Any], key: str, expected: Any
) -> None:
    torch = pytest.importorskip("torch")
    from isotrain.adapters.torch.optim.group_rates import momentum_setter

    groups = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)]
    optimizer = getattr(torch.optim, name)(groups, lr=0.1, **options)
    set_momentum = momentum_setter(optimizer)
    if expected is None:
        assert set_momentum is None
    else:
        set_momentum(0.5)
        assert [group[key] for group in optimizer.param_groups] == [expected] * 2
