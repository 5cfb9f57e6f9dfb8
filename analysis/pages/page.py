"""Self-contained HTML pages, all of one design: no network, no scripts, no fonts."""

from __future__ import annotations

import datetime
import functools
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isotrain.analysis.pages.canvas import NARROW, WIDE, missing, svg_inline
from isotrain.analysis.pages.plot import Plot
from isotrain.core.errors import IsotrainError
from isotrain.core.reporting import tables
from isotrain.core.system.files import atomic_write

REPORT_FILE = "report.html"
REPORT_PACKAGES = ("jinja2", "matplotlib")
"""Packages that pages need: the extra `report`."""
_FOLDER = Path(__file__).parent
_PARENT_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^/\s:'\",]+/)+")
"""The folders of an absolute path."""


@dataclass(frozen=True)
class _Drawn:
    """A plot with its wide and narrow drawing as trusted SVG markup."""

    plot: Plot
    wide: Any
    narrow: Any


def render(template: str, plots: Sequence[Plot], facts: Mapping[str, Any]) -> str:
    """Renders a page.

    Args:
        template: File name of the template in this folder; it extends `page.html.jinja`.
        plots: Plots of the page, in order.
        facts: Variables of the template.

    Raises:
        IsotrainError: A package that the page needs is not installed.
    """
    try:
        from markupsafe import Markup

        page_template = template_environment().get_template(template)
    except ImportError as error:
        raise missing(error) from None
    drawn = [
        _Drawn(plot, Markup(_inline(plot, "wide", WIDE)), Markup(_inline(plot, "narrow", NARROW)))
        for plot in plots
    ]
    style = Markup((_FOLDER / "page.css").read_text(encoding="utf-8"))
    page: str = page_template.render(style=style, plots=drawn, **facts)
    return page


@functools.cache
def template_environment() -> Any:
    """The Jinja environment, cached with its templates because compiling takes as long as rendering."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _inline(plot: Plot, variant: str, width: int) -> str:
    if plot.draw is None:
        return ""
    return svg_inline(plot.draw, f"{plot.name}-{variant}", width, plot.title, plot.summary)


def has_packages() -> bool:
    """Whether the packages that pages need are installed."""
    return all(importlib.util.find_spec(package) for package in REPORT_PACKAGES)


def write_page(html: str, folder: Path) -> Path:
    """Writes `report.html` into a folder atomically; returns its path.

    Raises:
        IsotrainError: The file cannot be written.
    """
    target = folder / REPORT_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(target, html.encode(errors="replace"))
    except OSError as error:
        raise IsotrainError(f"the report cannot be written to {folder}: {error}.") from error
    return target


def without_folders(value: Any) -> Any:
    """A plain value whose texts have no absolute paths: of each, the last part stays."""
    if isinstance(value, str):
        return _PARENT_FOLDERS.sub("", value)
    if isinstance(value, Mapping):
        return {name: without_folders(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(part) for part in value]
    return value


def spec_text(spec: Mapping[str, Any]) -> str:
    """A spec as indented JSON, without folders."""
    return json.dumps(without_folders(spec), indent=2, ensure_ascii=False, default=str)


def moment(seconds: float | None) -> str:
    """A Unix time as text."""
    if seconds is None or not math.isfinite(seconds):
        return "at an unknown time"
    time = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{time.day} {time:%B %Y, %H:%M} UTC"


def machine_line(machine: Mapping[str, Any]) -> str:
    """A machine in one line: processor, cores, memory, GPUs."""
    parts = [str(machine["processor"])] if machine.get("processor") else []
    for name, unit in (("cores", "cores"), ("memory_gib", "GiB of memory"), ("gpus", "GPUs")):
        if machine.get(name):
            parts.append(f"{tables.text_of(machine[name])} {unit}")
    return ", ".join(parts) or "machine not recorded"


def facts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rows of field label and formatted value."""
    return [(label(name), shown(name, value)) for name, value in values.items()]


def label(name: str) -> str:
    """The label of a field, with its unit."""
    for ending, unit in (("_per_s", "/s"), ("_gib", ", GiB"), ("_s", ", s")):
        if name.endswith(ending):
            name = f"{name.removesuffix(ending)}{unit}"
    return name.replace("_", " ")


def shown(name: str, value: Any) -> str:
    """The formatted value of a field; byte counts get a unit."""
    is_size = "bytes" in name and isinstance(value, int | float)
    return tables.size(value) if is_size else tables.text_of(value)
