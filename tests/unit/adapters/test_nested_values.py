"""Paths of what is behind attributes, and putting values back by them."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from isotrain.adapters.common.object_walk import iter_nested, set_by_path
from isotrain.core.errors import IsotrainError


class Own:
    """An object of a person's own."""

    def __init__(self) -> None:
        self.inner = [1.0]


def is_number(value: Any) -> bool:
    return isinstance(value, float)


def test_values_are_set_in_missing_containers() -> None:
    value = ({"left": [1.0, (2.0, 3.0)]}, deque([4.0]), Own(), "text", None)
    found = dict(iter_nested("state", value, is_number, set()))
    paths = ["(0){left}[0]", "(0){left}[1](0)", "(0){left}[1](1)", "(1)<0>", "(2).inner[0]"]
    assert list(found) == [f"state{path}" for path in paths]
    attributes: dict[str, Any] = {"state": None}
    for path in list(found)[:-1]:
        set_by_path(attributes, path, found[path] * 2)
    assert attributes["state"] == ({"left": [2.0, (4.0, 6.0)]}, deque([8.0]))


def test_containers_stay_the_same_objects() -> None:
    held = [1.0, 2.0]
    set_by_path({"state": held}, "state[1]", 5.0)
    assert held == [1.0, 5.0]


@pytest.mark.parametrize("path", ["", "state[x]", "state.inner.more"])
def test_a_path_to_nowhere_is_refused(path: str) -> None:
    with pytest.raises(IsotrainError):
        set_by_path({"state": None}, path, 1.0)
