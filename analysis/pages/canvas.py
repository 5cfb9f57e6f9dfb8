"""A canvas measured in pixels, and what it is saved as: SVG for a page, SVG for a file, PNG."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from isotrain.analysis.pages.units import tick
from isotrain.core.errors import IsotrainError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

WIDE, NARROW = 760, 340
"""Widths of a drawing in pixels, for a page and for a phone."""
PAPER, INK, MUTED, GRID, BAND = "#ffffff", "#16191d", "#59626d", "#d9dee4", "#e9eef3"
SERIES_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", INK, "#e69f00", "#56b4e9")
"""Okabe and Ito, "Color Universal Design" (2008), without the yellow, which white paper swallows."""
MARKERS = "osD^vPX*"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (9, 3)))

FONT_SIZE = 12
_CHARACTER = 7.0
"""Average width of a character in pixels."""
_LINE = 20
_SHORT_LEGEND = 8
_MARGIN = 18
"""Margin around a drawing in a separate file, in pixels."""
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_DECIMALS = re.compile(r"(\.\d\d)\d+")
_VARIABLES = {
    PAPER: "--paper",
    INK: "--plot-ink",
    MUTED: "--plot-muted",
    GRID: "--plot-grid",
    BAND: "--plot-band",
}
_STYLE = {
    "font.size": FONT_SIZE,
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib
    "svg.fonttype": "none",
    "svg.hashsalt": "isotrain",
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "grid.color": GRID,
    "hatch.color": PAPER,
    "hatch.linewidth": 1.2,
}


@dataclass(frozen=True)
class SeriesStyle:
    """Style of a series; series differ in marker and dash too, never in colour alone."""

    color: str
    marker: str = "o"
    dash: Any = "-"

    def line(self, width: float = 1.8) -> dict[str, Any]:
        """Keywords for a line with markers."""
        return {
            "color": self.color,
            "linestyle": self.dash,
            "linewidth": width,
            "marker": self.marker,
            "markersize": 6.5,
            "markeredgecolor": PAPER,
        }


class Canvas:
    """A matplotlib figure with coordinates in pixels from the top left."""

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.width, self.height = width, height
        self.figure: Figure = Figure(figsize=(width / 72, height / 72), dpi=72)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes with a light grid and nothing else around them."""
        bottom = self.height - top - height
        box = (
            *(left / self.width, bottom / self.height),
            *(width / self.width, height / self.height),
        )
        axes: Axes = self.figure.add_axes(box)
        axes.patch.set_visible(False)
        axes.tick_params(length=0, pad=6)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(True, linewidth=0.8)
        axes.xaxis.set_major_formatter(tick)
        axes.yaxis.set_major_formatter(tick)
        return axes

    def box(self, margin: float) -> Bbox:
        """The canvas with a margin of so many pixels, for saving."""
        from matplotlib.transforms import Bbox

        ends = (self.width + margin, self.height + margin)
        return Bbox([[-margin / 72, -margin / 72], [end / 72 for end in ends]])

    def text(self, x: float, y: float, text: str, **kwargs: Any) -> None:
        """Draws a text, vertically centred at `y`."""
        kwargs.setdefault("va", "center_baseline")
        self.figure.text(x / self.width, 1 - y / self.height, printable(text), **kwargs)

    def legend(self, top: float, handles: Iterable[Any], labels: Sequence[str]) -> None:
        """A legend in as many columns as fit; `legend_height` says how high it is."""
        self.figure.legend(
            list(handles),
            _legend_labels(labels, self.width),
            loc="upper left",
            bbox_to_anchor=(0, 1 - top / self.height),
            ncols=_legend_columns(labels, self.width),
            frameon=False,
            borderpad=0,
            borderaxespad=0,
            handlelength=3.2,
            columnspacing=1.6,
            labelspacing=(_LINE - FONT_SIZE) / FONT_SIZE - 0.12,
        )


def _legend_labels(labels: Sequence[str], width: float) -> list[str]:
    """The labels as displayed: shortened so that many of them fit into two columns."""
    room = width if len(labels) <= _SHORT_LEGEND else min(width, WIDE / 2)
    shown = [shortened(printable(label), int((room - 66) / _CHARACTER)) for label in labels]
    return [
        f"\u200b{label}" if label.startswith("_") else label for label in shown
    ]  # else left out


def _legend_columns(labels: Sequence[str], width: float) -> int:
    longest = max(map(len, _legend_labels(labels, width)), default=1)
    return max(1, min(len(labels), int(width // (longest * _CHARACTER + 66))))


def legend_height(labels: Sequence[str], width: float) -> float:
    """Height of a legend in pixels."""
    columns = _legend_columns(labels, width)
    return -(-len(labels) // columns) * _LINE + 6


def printable(text: str) -> str:
    """A text without the control characters that no SVG may hold."""
    return "".join(sign if sign.isprintable() else "\ufffd" for sign in text)


def shortened(name: str, limit: int) -> str:
    """A name of at most `limit` characters, with an ellipsis in its middle if cut."""
    if len(name) <= limit:
        return name
    tail = limit // 2
    return f"{name[: limit - tail - 1]}…{name[-tail:]}"


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """The report's own style, whatever the user's matplotlib is set to."""
    try:
        import matplotlib.style
    except ImportError as error:
        raise missing(error) from None
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def missing(error: ImportError) -> IsotrainError:
    """The error for a missing package that the report needs."""
    return IsotrainError(
        f"the HTML report needs packages that are not installed, such as {error.name}: `pip install jinja2"
        " matplotlib`; then the same command, or `isotrain report`, makes it from what is stored."
    )


Draw = Callable[[int], Canvas]


def png(draw: Draw) -> bytes:
    """The wide drawing as a PNG image on white, with two pixels per unit."""
    with _style():
        stream, canvas = io.BytesIO(), draw(WIDE)
        canvas.figure.savefig(
            stream,
            format="png",
            dpi=144,
            facecolor=PAPER,
            bbox_inches=canvas.box(_MARGIN),
            metadata={"Software": None},
        )
        return stream.getvalue()


def svg_file(draw: Draw, title: str, description: str) -> str:
    """The wide drawing as an SVG file of its own, on white."""
    root = _svg(draw, WIDE, _MARGIN)
    _describe(root, "plot", title, description)
    paper = {"width": "100%", "height": "100%", "fill": PAPER}
    root.insert(2, ElementTree.Element(f"{{{_SVG}}}rect", paper))
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def svg_inline(draw: Draw, name: str, width: int, title: str, description: str) -> str:
    """A drawing to embed in a page, whose style sheet sets the colours; ids begin with the unique `name`.

    Title and description (the figures in words) are for a screen reader.
    """
    root = _svg(draw, width)
    for element in root.iter():
        _localise(element, f"{name}-")
    _describe(root, name, title, description)
    del root.attrib["width"], root.attrib["height"]
    return ElementTree.tostring(root, encoding="unicode")


def _svg(draw: Draw, width: int, margin: float = 0) -> ElementTree.Element:
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    with _style():
        stream, canvas = io.BytesIO(), draw(width)
        canvas.figure.savefig(
            stream,
            format="svg",
            transparent=True,
            bbox_inches=canvas.box(margin),
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    root = ElementTree.fromstring(stream.getvalue())
    for element in root.iter():
        _slim(element)
    return root


def _slim(element: ElementTree.Element) -> None:
    """Drops invisible decimals and white space, half of a drawing's size."""
    for key in ("d", "x", "y"):
        if key in element.attrib:
            element.attrib[key] = _DECIMALS.sub(r"\1", " ".join(element.attrib[key].split()))
    if element.text and not element.text.strip():
        element.text = None
    element.tail = None


def _localise(element: ElementTree.Element, prefix: str) -> None:
    """Makes ids unique in the page, and colours and fonts the page's own."""
    for parent_style in element.findall(f"{{{_SVG}}}style"):
        element.remove(parent_style)  # it would hold for the whole page
    attributes = element.attrib
    if "id" in attributes:
        attributes["id"] = prefix + attributes["id"]
    link = f"{{{_XLINK}}}href"
    if attributes.get(link, "").startswith("#"):
        attributes[link] = f"#{prefix}{attributes[link][1:]}"
    for key in ("style", "clip-path", "fill"):
        if key in attributes:
            attributes[key] = _themed(attributes[key].replace("url(#", f"url(#{prefix}"))


def _themed(text: str) -> str:
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


def _describe(root: ElementTree.Element, name: str, title: str, description: str) -> None:
    """Names and describes a drawing for those who do not see it."""
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title")
    root.set("aria-describedby", f"{name}-desc")
    for position, (tag, text) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
        element.text = printable(text)
        root.insert(position, element)
