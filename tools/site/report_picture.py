"""Picture of a section of a report, for the README.

python tools/site/report_picture.py comparisons/digits/report.html loss docs/report-loss.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from helpers import browser

_WIDTH = 860


def main(report: str, section: str, target: str) -> None:
    """Opens the report in Chromium and saves the section whose heading has that id as PNG."""
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser.find())
        page = chromium.new_page(viewport={"width": _WIDTH, "height": 900})
        page.goto(Path(report).resolve().as_uri())
        page.add_style_tag(content="section { padding: 1rem; } details { display: none; }")
        page.locator(f"section[aria-labelledby={section}]").screenshot(path=target)
        chromium.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
