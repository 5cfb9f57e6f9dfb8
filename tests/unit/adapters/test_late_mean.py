"""Losses of local steps that come after their step."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from isotrain.adapters.torch.comm.late_mean import LateMeans, LateScalar, PendingMean, followed_by


class Under:
    """A mean of 2.5 under way, which a wait completes."""

    def __init__(self) -> None:
        self.is_done = False
        self.mean = PendingMean(
            self._wait, lambda: self.is_done, torch.zeros(2, dtype=torch.float64)
        )

    def _wait(self) -> torch.Tensor:
        assert not self.is_done, "waited for twice"
        self.is_done = True
        return torch.tensor(2.5, dtype=torch.float64)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "float": float,
    "item": lambda loss: loss.item(),
    "format": lambda loss: float(f"{loss:.1f}"),
    "numpy": np.asarray,
    "sum": lambda loss: 0 + loss,
    "list": lambda loss: torch.stack([loss, loss])[1],
    "keyword": lambda loss: torch.add(input=loss, other=0.0),
    "in place": lambda loss: torch.zeros(()).copy_(loss),
    "detach": lambda loss: loss.detach(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda loss: pickle.loads(pickle.dumps(loss)),  # noqa: S301  # its own
    "dlpack": torch.from_dlpack,
    "tensor": torch.tensor,  # these take it for a number
    "tensor of a list": lambda loss: torch.tensor([loss, 0.0])[0],
    "full": lambda loss: torch.full((), loss),
    "alpha": lambda loss: torch.zeros(()).add(torch.ones(()), alpha=loss),
    "subclass": lambda loss: loss.as_subclass(torch.Tensor),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", READS)
def test_any_read_waits_for_the_value(name: str) -> None:
    under = Under()
    loss = LateMeans().scalar(under.mean)
    assert isinstance(loss, LateScalar)
    assert not loss.is_ready
    for _ in range(2):
        read = READS[name](loss)
        assert float(read) == 2.5
        assert type(read) is not LateScalar
    assert loss.is_ready


def test_shape_dtype_and_device_are_known_before() -> None:
    under = Under()
    loss = LateMeans().scalar(under.mean)
    assert (loss.shape, loss.dtype, loss.device) == ((), torch.float64, torch.device("cpu"))
    assert not under.is_done


def test_a_function_of_a_mean_is_late_too() -> None:
    under = Under()
    loss = LateMeans().scalar(followed_by(under.mean, torch.square))
    assert not under.is_done
    assert float(loss) == 6.25
    assert float(followed_by(lambda: torch.tensor(3.0), torch.square)()) == 9


def test_a_replica_is_at_most_64_steps_ahead() -> None:
    late, under = LateMeans(), [Under() for _ in range(66)]
    for each in under[:64]:
        late.scalar(each.mean)
    assert not any(each.is_done for each in under)
    late.scalar(under[64].mean)
    late.scalar(under[65].mean)
    assert [each.is_done for each in under] == [True] * 2 + [False] * 64
    late.wait()
    assert all(each.is_done for each in under)


def test_a_completed_mean_is_a_plain_tensor() -> None:
    done = PendingMean(lambda: torch.tensor(2.0), lambda: True, torch.zeros(()))
    assert type(LateMeans().scalar(done)) is torch.Tensor
    assert type(LateMeans().scalar(lambda: torch.tensor(2.0))) is torch.Tensor
