"""The site of the documentation: what can be said of it without MkDocs, which builds it with `--strict`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isotrain.core.cli.app import parser
from isotrain.core.spec.training_spec import TrainingSpec

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


def load(path: Path) -> Any:
    """A module of the tools, which are no package."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


pages = load(ROOT / "tools" / "site" / "pages.py")


def nav_paths(entry: Any) -> Iterator[str]:
    """Paths of the pages that a part of the navigation names."""
    if isinstance(entry, str):
        yield entry
    else:
        for each in entry.values() if isinstance(entry, dict) else entry:
            yield from nav_paths(each)


def test_the_navigation_names_every_page_once() -> None:
    """Whoever adds a page to `docs` adds it to `nav` of mkdocs.yml, in its kind: how-to, reference, ..."""
    nav = list(nav_paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    written = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    made = ["index.md", "CHANGELOG.md", "CONTRIBUTING.md", *pages.reference_pages()]
    assert sorted(nav) == sorted(written + made)


@pytest.mark.parametrize(
    ("target", "moved"),
    [
        ("../spec.md#loss", "../spec.md#loss"),
        ("../../README.md", "../index.md"),
        ("../../examples/digits.py", "../examples/digits.py.md"),
        ("../../examples/familiar", "../examples/familiar.md"),
        ("https://example.org/a.md", "https://example.org/a.md"),
        ("#loss", "#loss"),
    ],
)
def test_links_lead_to_pages_of_the_site(target: str, moved: str) -> None:
    text = "[a]({0})\n```python\nb[0]({0})\n```\n"
    linked = pages.with_site_links(text.format(target), "docs/launching/slurm.md")
    assert linked == text.format(target).replace(target, moved, 1)


def test_what_pages_link_to_is_on_the_site() -> None:
    texts = pages.repository_pages(["docs/needs.md", "docs/coming-from.md"])
    example = (ROOT / "examples" / "by_need" / "gan.py").read_text(encoding="utf-8")
    assert example.rstrip() in texts["examples/by_need/gan.py"]
    assert "* [vae.py](familiar/vae.py)" in texts["examples/familiar"]
    assert "examples/familiar/vae.py" in texts


def test_programs_side_by_side_are_tabs() -> None:
    page = (DOCS / "coming-from.md").read_text(encoding="utf-8")
    tabs = pages.with_tabs(page)
    assert "<table>" not in tabs
    assert tabs.count('=== "isotrain"') == page.count("<table>")
    assert tabs.count('\n=== "From ') == page.count("\n## From ")
    assert [line.strip() for line in tabs.splitlines() if "optimizer" in line] == [
        line for line in map(str.strip, page.splitlines()) if "optimizer" in line
    ]


def test_the_reference_has_every_command_and_field() -> None:
    commands, fields = pages.command_line_page(), pages.spec_page()
    for name in parser().commands:
        assert f"\n## {name}\n" in commands
    assert "--backend NAME[:COLLECTIVE]` |" in commands
    for name in TrainingSpec.model_fields:
        assert f"\n| `{name}` |" in fields


def test_llms_txt_has_the_first_sentence_of_a_page() -> None:
    page = "# Title\n\n```sh\nls\n```\n\nSee [this](a.md)\nfirst. Then that.\n"
    assert pages.first_sentence(page) == "See this first."
