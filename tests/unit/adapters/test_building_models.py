"""How a torch backend builds the spec's model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from isotrain.adapters.torch.trainer.build import build_trainer
from isotrain.plugin import SpecError, TrainingSpec


def spec_of(model: Any, **fields: Any) -> TrainingSpec:
    return TrainingSpec(
        model={"torch": model},
        data=dict,
        loss="mse",
        optimizer={"name": "sgd", "lr": 0.5},
        global_batch_size=2,
        steps=1,
        **fields,
    )


def test_a_native_model_draws_its_weights_on_the_cpu() -> None:
    """A seed gives the same initial weights whatever device trains them; `meta` stands for a GPU."""
    devices: list[torch.device] = []

    def model() -> Any:
        devices.append(torch.empty(1).device)
        return torch.nn.Linear(2, 1)

    trainer = build_trainer(spec_of(model), torch.device("meta"))
    assert [device.type for device in devices] == ["cpu"]
    assert {weight.device.type for weight in trainer.trainable.values()} == {"meta"}


def test_wrappers_do_not_name_weights_and_what_was_compiled_stays_so() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def model() -> Any:
        part = torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)), backend=backend)
        inner = torch.nn.ModuleDict({"first": part, "again": part, "last": torch.nn.Linear(2, 1)})
        inner.forward = lambda inputs: inner["last"](inner["again"](inputs))
        return torch.nn.DataParallel(inner)

    trainer = build_trainer(spec_of(model), torch.device("cpu"))
    assert list(trainer.trainable) == ["first.0.weight", "first.0.bias", "last.weight", "last.bias"]
    assert trainer.aliases == {
        "first.0.weight": ("again.0.weight",),
        "first.0.bias": ("again.0.bias",),
    }
    assert not graphs
    trainer.model(torch.ones(3, 2))
    assert len(graphs) == 1


class Calling(torch.nn.Module):
    """A model whose forward pass calls what `DataParallel` has wrapped by the attribute `module`."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.part = torch.nn.DataParallel(inner)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.part.module(inputs)
        return output


def test_a_forward_pass_may_call_what_data_parallel_has_wrapped() -> None:
    trainer = build_trainer(spec_of(lambda: Calling(torch.nn.Linear(2, 1))), torch.device("cpu"))
    assert list(trainer.trainable) == ["part.weight", "part.bias"]
    copied = copy.deepcopy(trainer.model)
    assert list(copied.state_dict()) == ["part.weight", "part.bias"]
    for each in (trainer.model, copied):
        inputs = torch.ones(3, 2)
        assert torch.equal(each(inputs), each.part(inputs))
        assert each.part.module is each.part


def test_a_module_in_data_parallel_that_has_a_module_itself_is_refused() -> None:
    """Else `part.module` would be another one than the model's author means."""

    def model() -> Any:
        inner = torch.nn.Sequential()
        inner.add_module("module", torch.nn.Linear(2, 1))
        return Calling(inner)

    with pytest.raises(SpecError, match="'part' is a DataParallel around a Sequential that has an"):
        build_trainer(spec_of(model), torch.device("cpu"))


def test_weights_that_were_made_in_inference_mode_are_refused() -> None:
    def model(trained: bool) -> Any:
        with torch.inference_mode():
            first = torch.nn.Linear(2, 2).requires_grad_(trained)
        return torch.nn.Sequential(first, torch.nn.Linear(2, 1))

    with pytest.raises(SpecError, match=r"0\.weight, 0\.bias: made under torch\.inference_mode"):
        build_trainer(spec_of(model, model_args={"trained": True}), torch.device("cpu"))
    trainer = build_trainer(spec_of(model, model_args={"trained": False}), torch.device("cpu"))
    assert list(trainer.trainable) == ["1.weight", "1.bias"]


def test_two_parameters_in_the_same_memory_are_refused() -> None:
    """Sharded updates would lose one of their gradients: each replica updates one of them."""

    def tied_by_data(trained: bool) -> Any:
        first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        second.weight.data = first.weight.data
        return torch.nn.Sequential(first.requires_grad_(trained), second.requires_grad_(trained))

    def spec(trained: bool) -> Any:
        return spec_of(tied_by_data, model_args={"trained": trained})

    message = r"0\.weight and 1\.weight are two parameters in the same memory.*torch\.nn\.Parameter"
    with pytest.raises(SpecError, match=message):
        build_trainer(spec(True), torch.device("cpu"))

    def tied_over_models() -> Any:
        vectors = torch.ones(3, 2)
        one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        one.weight = torch.nn.Parameter(vectors[:2])
        other.weight = torch.nn.Parameter(vectors[1:])
        return {"critic": one, "actor": other}

    with pytest.raises(SpecError, match=r"actor\.weight and critic\.weight are two parameters"):
        build_trainer(spec_of(tied_over_models), torch.device("cpu"))


def test_parameters_in_one_buffer_and_tied_ones_are_taken() -> None:
    def model() -> Any:
        columns = torch.arange(12.0).reshape(2, 6)
        first, second, third = (torch.nn.Linear(2, 2) for _ in range(3))
        first.weight = torch.nn.Parameter(columns[:, 0::3])
        second.weight = torch.nn.Parameter(columns[:, 1::3])
        third.weight = first.weight
        return torch.nn.Sequential(first, second, third)

    trainer = build_trainer(spec_of(model), torch.device("cpu"))
    assert trainer.aliases == {"0.weight": ("2.weight",)}
    assert len(trainer.trainable) == 5


def test_a_compiled_model_is_trained_compiled() -> None:
    calls: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    trainer = build_trainer(
        spec_of(lambda: torch.compile(torch.nn.Linear(2, 1), backend=backend)), torch.device("cpu")
    )
    assert list(trainer.trainable) == ["weight", "bias"]
    loss, _ = trainer.loss_module(torch.ones(2, 2), torch.ones(2, 1))
    loss.backward()
    assert len(calls) == 1
    assert trainer.trainable["weight"].grad is not None
