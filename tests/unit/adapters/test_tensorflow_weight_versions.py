"""Versions of the weights of a TensorFlow stage."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from helpers.isolated import run_isolated
from integration.session_specs import spec

import isotrain


def updates(session: isotrain.Session) -> dict[str, Any]:
    """Whether the oldest version is there while the weight is updated, and all versions after each update."""
    import tensorflow as tf

    from isotrain.adapters.tensorflow.pipeline.delayed_updates import TensorFlowWeightVersions

    weight = tf.Variable(tf.zeros(8))
    versions = TensorFlowWeightVersions({"0": weight}, 2, "layout")
    found: dict[str, Any] = {"held": [], "values": []}
    for _ in range(4):
        oldest = weakref.ref(list(versions.state().values())[-1])
        with versions.updating():
            found["held"].append(oldest() is not None)
            weight.assign_add(tf.ones(8))
        earlier = [float(value[0]) for value in versions.state().values()]
        found["values"].append([float(weight[0]), *earlier])
    return found


@pytest.mark.slow
def test_the_oldest_version_is_freed_before_an_update(tmp_path: Path) -> None:
    found = run_isolated(updates, spec(), "tf-mirrored", tmp_path / "run")
    assert found["values"] == [[1, 0, 0], [2, 1, 0], [3, 2, 1], [4, 3, 2]]
    assert found["held"] == [False] * 4
