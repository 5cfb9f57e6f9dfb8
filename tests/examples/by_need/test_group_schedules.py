"""Schedules of optimizer groups against a plain loop with a rate for each layer."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from examples.by_need.harness import Plain, cells, check, load

import isotrain

EXAMPLE = "group_schedules"
FREEZING = "../../tests/examples/programs/freezing_groups"


def plain(start: Plain) -> None:
    """Keras' rule of momentum, whose buffer has the rates of earlier steps in it."""
    import torch

    head = [variable.value for variable in start.model.layers[-1].trainable_variables]
    weights = [variable.value for variable in start.model.trainable_variables]
    momenta = [torch.zeros_like(weight) for weight in weights]
    per_epoch = len(start.batches) // 3
    for step, (inputs, targets) in enumerate(start.batches):
        logits = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(logits, targets.long())
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, gradient, momentum in zip(weights, gradients, momenta, strict=True):
                is_head = any(weight is each for each in head)
                backbone_rate = 0.125 * min(1.0, max(0, step - 2) / 4) * 0.25
                rate = 0.125 * 0.5 ** (step // per_epoch) if is_head else backbone_rate
                momentum.mul_(0.75).sub_(rate * gradient)
                weight.add_(momentum)


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)


def freezing(start: Plain) -> None:
    """Rates that no float32 holds, and weights that some steps leave out."""
    import torch

    variables = start.model.trainable_variables
    weights = [variable.value for variable in variables]
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step, (inputs, targets) in enumerate(start.batches):
        logits = start.model(inputs, training=True)
        loss = torch.nn.functional.cross_entropy(logits, targets.long())
        gradients = torch.autograd.grad(loss, weights)
        scale = 0.25 * (0.5 if step >= 7 else 1.0)
        for variable, gradient, buffer in zip(variables, gradients, momenta, strict=True):
            is_backbone = "backbone" in variable.path
            if step in (range(3) if is_backbone else [6]):
                continue
            fraction = 0.5 * (1 - step / len(start.batches)) if is_backbone else 0.5 ** (step // 3)
            is_other_bias = variable.path.endswith("bias") and not is_backbone
            with torch.no_grad():
                buffer.mul_(0.75 if is_other_bias else 0.5).sub_(scale * fraction * gradient)
                variable.value.add_(buffer)


@pytest.mark.examples
@cells(FREEZING)
def test_freezing_of_groups_equals_the_plain_program(
    backend: str, replicas: int, tmp_path: Path
) -> None:
    check(FREEZING, freezing, backend, replicas, tmp_path)


@pytest.mark.examples
@pytest.mark.parametrize("backend", ["torch-ddp", "tf-mirrored"])
def test_without_capture(backend: str, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, 2, tmp_path, capture=False)


@pytest.mark.examples
@pytest.mark.parametrize(("first", "second"), [("torch-ddp", "tf-multiworker")])
def test_a_resumed_run_goes_on_at_the_rates_of_the_groups(
    first: str, second: str, tmp_path: Path
) -> None:
    spec = load(EXAMPLE).spec.replace(precision="float64", threads=1)
    whole = isotrain.run(spec, backend=first, replicas=1, output=tmp_path / "whole")
    rates = [0.125 * 0.25 * fraction for fraction in (0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1)]
    assert whole.history.scalars["learning_rate_group_0"] == dict(enumerate(rates))
    part = spec.replace(checkpoint={"every_steps": 4})
    isotrain.launch(
        functools.partial(until, step=4),
        part,
        backend=first,
        replicas=2,
        output=tmp_path / "run",
    )
    resumed = isotrain.resume(tmp_path / "run", backend=second, replicas=2)
    for name, weight in whole.weights.items():
        np.testing.assert_allclose(resumed.weights[name], weight, rtol=0, atol=1e-12, err_msg=name)


def until(session: isotrain.Session, step: int) -> None:
    for batch in session.batches():
        session.step(batch)
        if session.steps_done == step:
            assert session.learning_rate(step, group=0) == 0.125 * 0.25 * 0.5
            session.save()
            return
