"""Mean teacher against two plain models."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples.by_need.harness import Plain, cells, check

EXAMPLE = "mean_teacher"


def plain(start: Plain) -> None:
    """A student by torch's SGD, and a teacher that follows it."""
    import keras
    import torch

    example, student = start.example, start.model
    teacher = keras.models.clone_model(student)
    teacher.set_weights(student.get_weights())
    weights = [each.value for each in student.trainable_variables]
    averages = [each.value for each in teacher.trainable_variables]
    optimizer = torch.optim.SGD(weights, lr=0.125)
    for step in range(example.STEPS):
        points, noisy, one_hot = map(torch.from_numpy, example.samples(step))
        target = teacher(points).detach()
        logits = student(noisy)
        cross_entropy = -(one_hot * logits.log_softmax(-1)).sum(-1)
        optimizer.zero_grad()
        (cross_entropy + ((logits - target) ** 2).mean(-1)).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight, 0.125)
    student.set_weights(teacher.get_weights())


@pytest.mark.examples
@cells(EXAMPLE)
def test_equals_the_plain_program(backend: str, replicas: int, tmp_path: Path) -> None:
    check(EXAMPLE, plain, backend, replicas, tmp_path)
