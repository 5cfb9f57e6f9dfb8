"""Whatever is read back from a file is shown as it is, or refused with the file and the field."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from unit.analysis.comparison_samples import typical

from isotrain.analysis.compare import text
from isotrain.analysis.compare.report import html as html_report
from isotrain.analysis.compare.result import Comparison, read_comparison
from isotrain.core.errors import IsotrainError

STRANGE: list[Any] = [
    *(None, True, -1, 0, 10**30, 10**400, -1e300, math.nan, "", "NaN", "x" * 99, [], {}),
    *([[]], [None], {"a": {}}, "Infinity"),
]
WHOLE: dict[str, Any] = json.loads(typical().to_json())


def mutated(rng: random.Random) -> dict[str, Any]:
    """A comparison in which one value, somewhere, is missing or another one."""
    changed: dict[str, Any] = json.loads(json.dumps(WHOLE))
    here: Any = changed
    while True:
        key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
        if isinstance(here[key], dict | list) and here[key] and rng.random() < 0.8:
            here = here[key]
            continue
        if rng.random() < 0.2:
            del here[key]
        else:
            here[key] = rng.choice(STRANGE)
        return changed


def read(folder: Path, plain: Any) -> Comparison | str:
    """The comparison, or why it is none."""
    (folder / "comparison.json").write_text(json.dumps(plain))
    try:
        return read_comparison(folder)
    except IsotrainError as error:
        return str(error)


@pytest.mark.slow
def test_an_edited_comparison_is_shown_or_refused(tmp_path: Path) -> None:
    rng = random.Random(7)
    found = [read(tmp_path, mutated(rng)) for _ in range(120)]
    refused = [each for each in found if isinstance(each, str)]
    assert all("comparison.json" in each for each in refused)
    assert 40 < len(refused) < 120
    for each in found:
        if isinstance(each, Comparison):
            text.result(each)
            each.to_csv()
            html_report.render(each, [])


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("cells", 1, "step_s", "low"), "fast", r"cells\[1\]: step_s: low: expected a number"),
        (("cells", 1, "step_s", "low"), math.nan, r"cells\[1\]: step_s: expected an interval"),
        (("cells", 0, "replicas"), 1.5, r"cells\[0\]: replicas: expected a whole number"),
        (("cells", 0, "colour"), "red", r"cells\[0\]: it has colour"),
        (("created",), 1e300, "created: expected a time"),
        (("verdict", "pick"), "nobody", "verdict: pick: there is no cell 'nobody'"),
        (("reference",), 7, "reference: expected text, received 7"),
    ],
)
def test_the_file_and_the_field_are_named(
    tmp_path: Path, path: tuple[Any, ...], value: Any, words: str
) -> None:
    changed = json.loads(json.dumps(WHOLE))
    here = changed
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    (tmp_path / "comparison.json").write_text(json.dumps(changed))
    with pytest.raises(IsotrainError, match=rf"comparison\.json: {words}"):
        read_comparison(tmp_path)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[]", "7", ""])
def test_other_files_are_errors_that_name_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "comparison.json").write_text(content)
    with pytest.raises(IsotrainError, match=r"comparison\.json"):
        read_comparison(tmp_path)
