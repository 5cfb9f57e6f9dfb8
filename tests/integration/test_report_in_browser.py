"""The reports as people see them, in headless Chromium: phone and desktop, light and dark, and print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from helpers import browser
from integration.session_specs import spec
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright
from unit.analysis import comparison_samples as samples
from unit.analysis.parity_samples import small_parity

import isotrain
from isotrain.analysis.compare.report.html import render
from isotrain.analysis.parity import report as parity_report
from isotrain.analysis.run_report import html as run_report
from isotrain.analysis.run_report.run_files import RunFiles

pytestmark = [pytest.mark.features, pytest.mark.usefixtures("reference")]

SIZES: dict[str, ViewportSize] = {
    "phone": {"width": 360, "height": 740},
    "narrow": {"width": 500, "height": 740},
    "desktop": {"width": 1200, "height": 900},
}
READABLE = 4.5
"""Contrast of text and paper that WCAG 2.2 asks for, level AA."""
PAPER_WIDTH = 680
"""Pixels between the margins of a sheet of A4."""

TOO_WIDE = """() => [...document.querySelectorAll("body *")].filter(e => {
  if (e.parentElement.closest(".scroll") || e.closest(".hidden, .skip")) return false;
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
}).map(e => e.outerHTML.slice(0, 100))"""
DRAWINGS = """() => [...document.querySelectorAll("figure:not(.media *)")].map(figure =>
  [...figure.querySelectorAll("svg")].filter(svg => svg.checkVisibility()).map(svg => {
    const box = svg.getBoundingClientRect();
    const cut = [...svg.querySelectorAll("text")].filter(text => {
      const inner = text.getBoundingClientRect();
      return inner.left < box.left - 2 || inner.right > box.right + 2
        || inner.top < box.top - 2 || inner.bottom > box.bottom + 2;
    }).map(text => text.textContent);
    return {width: box.width, height: box.height, cut};
  }))"""
COLOURS = """() => [getComputedStyle(document.body).backgroundColor,
  ...new Set([...document.querySelectorAll("svg text")].filter(t => t.checkVisibility())
    .map(t => getComputedStyle(t).fill))]"""


@dataclass
class Seen:
    """A page that was opened, and what the browser said meanwhile."""

    page: Page
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    path = browser.find()
    if path is None:
        (pytest.fail if browser.is_required() else pytest.skip)(browser.MISSING)
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    pages = {name: render(make()) for name, make in samples.ALL.items()}
    pages["parity"] = parity_report.render(small_parity())
    pages["run"] = run_report.render(RunFiles(finished_run(folder / "run")))
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


def finished_run(folder: Path) -> Path:
    """Directory of a small run with two replicas."""
    fields = spec(metrics=["mean_absolute_error"], callbacks=[LongNames()])
    isotrain.run(fields, backend="reference", replicas=2, output=folder)
    return folder


class LongNames(isotrain.Callback):
    """Logs media and numbers whose names have no place to break."""

    def on_start(self, session: isotrain.Session) -> None:
        name = "/".join(["encoder_block_12_attention_output_projection_kernel"] * 3)
        session.log_image(name, np.zeros((4, 4)), step=0)
        session.log_histogram(name, np.arange(9.0), step=0)
        session.log_text(name, "x" * 300, step=0)


def opened(chromium: Browser, path: Path, **context: Any) -> Seen:
    page = chromium.new_context(**context).new_page()
    seen = Seen(page)
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("console", lambda message: seen.messages.append(message.text))
    page.on("pageerror", lambda error: seen.messages.append(str(error)))
    page.on("dialog", lambda dialog: seen.messages.append(dialog.message))
    page.goto(path.as_uri())
    return seen


def contrast(one: str, two: str) -> float:
    """The ratio of two opaque colours, as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    darker, lighter = sorted((luminance(one), luminance(two)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("name", [*samples.ALL, "parity", "run"])
def test_the_page_fits_every_width_and_shows_everything(
    chromium: Browser, reports: dict[str, Path], name: str
) -> None:
    """It is opened once: the page has no script that depends on the width at that time."""
    seen = opened(chromium, reports[name])
    assert_fits(seen.page, "phone", "light")
    assert_fits(seen.page, "narrow", "light")
    assert_fits(seen.page, "desktop", "dark")
    assert_fits(seen.page, "desktop", "light")
    assert_fits(seen.page, "phone", "dark")
    assert seen.messages == []
    assert seen.requests == [reports[name].as_uri()]
    seen.page.context.close()


def assert_fits(page: Page, size: str, scheme: Literal["light", "dark"]) -> None:
    page.set_viewport_size(SIZES[size])
    page.emulate_media(color_scheme=scheme)
    assert page.evaluate("innerWidth") == SIZES[size]["width"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(TOO_WIDE) == []
    for drawings in page.evaluate(DRAWINGS):
        (only,) = drawings
        assert only["width"] > 300
        assert only["height"] > 50
        assert only["cut"] == []
    paper, *texts = page.evaluate(COLOURS)
    assert (contrast(paper, "rgb(0, 0, 0)") < 2) == (scheme == "dark")
    assert all(contrast(paper, text) >= READABLE for text in texts)


@pytest.mark.parametrize("name", ["interrupted", "none_finished", "parity", "run"])
def test_the_page_keeps_the_rules_for_accessible_pages(
    chromium: Browser, reports: dict[str, Path], name: str
) -> None:
    seen = opened(chromium, reports[name], viewport=SIZES["phone"])
    seen.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert_accessible(seen.page)
    seen.page.set_viewport_size(SIZES["desktop"])
    seen.page.emulate_media(color_scheme="dark")
    assert_accessible(seen.page)
    seen.page.context.close()


def assert_accessible(page: Page) -> None:
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("name", ["typical", "many", "hostile", "parity", "run"])
def test_the_printed_page_is_light_and_complete(
    chromium: Browser, reports: dict[str, Path], name: str
) -> None:
    size = {"width": PAPER_WIDTH, "height": 1000}
    seen = opened(chromium, reports[name], viewport=size, color_scheme="dark")
    seen.page.emulate_media(media="print")
    assert seen.page.evaluate(TOO_WIDE) == []
    paper, *texts = seen.page.evaluate(COLOURS)
    assert paper == "rgb(255, 255, 255)"
    assert all(contrast(paper, text) >= READABLE for text in texts)
    cut = "() => [...document.querySelectorAll('.scroll')].filter(e => e.checkVisibility()"
    cut += " && e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 80))"
    assert seen.page.evaluate(cut) == []
    if name == "typical":
        differences = seen.page.get_by_label("How the plan of torch-ddp:gloo@2 differs")
        assert differences.bounding_box()
        assert not seen.page.get_by_text("The same as a table").first.is_visible()
    if name == "hostile":  # others take seconds to print
        assert seen.page.pdf(format="A4").startswith(b"%PDF")
    seen.page.context.close()


def test_wide_tables_scroll_and_keep_the_names_visible(
    chromium: Browser, reports: dict[str, Path]
) -> None:
    seen = opened(chromium, reports["typical"], viewport=SIZES["phone"])
    moved = seen.page.evaluate("""() => {
      const box = document.querySelector(".scroll");
      box.scrollLeft = 150;
      const name = box.querySelector("tbody th").getBoundingClientRect();
      const reason = box.querySelector(".reason").getBoundingClientRect();
      return [box.scrollLeft, name.left, reason.left - name.right, innerWidth - reason.right];
    }""")
    assert moved[0] == 150
    assert moved[1] >= 0
    assert moved[2] >= -1, "the reason goes under the name"
    assert moved[3] >= 0, "the reason is cut off"
    seen.page.context.close()


def test_a_missing_browser_fails_only_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert browser.find() is None
    assert "apt install" in browser.MISSING
    monkeypatch.setenv(browser.REQUIRED_VARIABLE, "1")
    assert browser.is_required()
