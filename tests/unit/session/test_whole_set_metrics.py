"""Metric objects of torchmetrics' kind get tensors on the group's device, and move there themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from isotrain.core.session.training.whole_set_metrics import WholeSetMetrics


class DeviceTensor:
    """Tensor whose values only the group can read, as on a GPU."""

    device = "gpu:1"

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def numpy(self) -> np.ndarray:
        raise TypeError("the tensor is on another device")

    def __array__(self, *args: Any) -> np.ndarray:
        raise TypeError("the tensor is on another device")


class Group:
    tensor = staticmethod(DeviceTensor)

    @staticmethod
    def numpy(tensor: DeviceTensor) -> np.ndarray:
        return tensor.array


class Errors:
    """Metric with a device, as those of torchmetrics; a dict of tensors."""

    device = "cpu"

    def reset(self) -> None:
        self.device = "cpu"

    def to(self, device: str) -> Errors:
        self.device = device
        return self

    def __call__(self, predictions: DeviceTensor, targets: DeviceTensor) -> dict[str, Any]:
        assert predictions.device == targets.device == self.device
        errors = np.abs(predictions.array - targets.array)
        return {"max": DeviceTensor(errors.max()), "each": DeviceTensor(errors)}


class Bias:
    """Metric as those of Keras, which take arrays and return a tensor."""

    def reset_state(self) -> None:
        pass

    def __call__(self, targets: np.ndarray, predictions: np.ndarray) -> DeviceTensor:
        return DeviceTensor(np.mean(predictions - targets))


def test_metric_objects_work_on_any_device() -> None:
    group: Any = Group()
    whole_set = WholeSetMetrics({"errors": Errors, "bias": Bias()}, group)
    whole_set._targets, whole_set._predictions = [np.zeros(2)], [np.array([1.0, 3.0])]
    assert whole_set.results() == {
        "errors/max": 3.0,
        "errors/each/0": 1.0,
        "errors/each/1": 3.0,
        "bias": 2.0,
    }
