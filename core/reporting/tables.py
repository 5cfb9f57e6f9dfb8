"""Tables as text: drawn in a terminal, Markdown or aligned text elsewhere; no text is cut off."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isotrain.core.errors import IsotrainError
from isotrain.core.system.standard_streams import escape_controls


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The rows as a `pandas.DataFrame`.

    Raises:
        IsotrainError: pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise IsotrainError(
            f"to_pandas needs pandas, which cannot be imported ({error}). Install it (pip install"
            " pandas), or use to_dict() or to_json()."
        ) from None
    return pandas.DataFrame(rows)


_NO_LIMIT = 100_000
"""Width, in characters, of output that goes to no terminal."""
_GAP = 2
"""Characters between two columns of a table in a terminal."""
_STYLES = {"yes": "green", "no": "red"}


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    narrow: Callable[[Sequence[str]], str] | None = None,
) -> str:
    """Renders a table; in a terminal that is too narrow, cells are folded between words.

    Where a word would not fit, each row is a block of facts: what is copied is never broken.

    Args:
        columns: Headings of the columns.
        rows: Rows with one text per column; `yes` and `no` are coloured.
        narrow: Function that renders a row where a word would not fit, or None: `facts` does.
    """
    rows = [[escape_controls(" ".join(cell.split())) for cell in row] for row in rows]
    terminal = is_terminal()
    grid = Table(
        box=box.SIMPLE_HEAD if terminal else box.MARKDOWN,
        header_style="bold",
        padding=(0, _GAP - 1, 0, 0) if terminal else (0, 1),
        pad_edge=not terminal,
        show_edge=not terminal,
    )
    widths = _widths([columns, *rows])
    available = _width() - _GAP * (len(columns) - 1)
    if sum(widths) > available:
        heads = [column.replace("-", "-\n") for column in columns]
        words = [[max(cell.split(), key=len, default="") for cell in row] for row in [heads, *rows]]
        minimum = _widths(words)
        if sum(minimum) > available:
            if narrow is not None:
                return "".join(map(narrow, rows))
            blocks = (facts(row[0], zip(columns[1:], row[1:], strict=True)) for row in rows)
            return "\n".join(blocks)
        columns, widths = heads, _fitted_widths(available, widths, minimum)
    for column, width in zip(columns, widths, strict=True):
        grid.add_column(column, overflow="fold", width=width)
    for row in rows:
        grid.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return _rendered(grid)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of the longest text of each column, in terminal cells."""
    return [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]


def _fitted_widths(available: int, natural: Sequence[int], minimum: Sequence[int]) -> list[int]:
    """Widths of columns that do not all fit: whole words first, then the rest where it lacks most."""
    widths = list(minimum)
    while sum(widths) < available:
        lacking = [wanted - width for wanted, width in zip(natural, widths, strict=True)]
        widths[lacking.index(max(lacking))] += 1
    return widths


def facts(heading: str | None, rows: Iterable[tuple[str, str]]) -> str:
    """Renders names and their values below a heading; a word that fits no line, as a path, stays whole."""
    indent = "  " if heading else ""
    pairs = [(escape_controls(indent + name), escape_controls(value)) for name, value in rows]
    width = max((cell_len(name) for name, _ in pairs), default=0)
    lines = []
    for name, value in pairs:
        if max(map(cell_len, value.split()), default=0) > _width() - width - _GAP:
            lines.append(f"{name}{' ' * (width - cell_len(name) + _GAP)}{value}\n")
            continue
        grid = Table.grid(padding=(0, _GAP))
        grid.add_column(no_wrap=True, min_width=width)
        grid.add_column(overflow="fold")
        grid.add_row(Text(name), Text(value))
        lines.append(_rendered(grid))
    title = [] if heading is None else [_rendered(Text(heading, style="bold"))]
    return "".join([*title, *lines])


def paragraph(text: str) -> str:
    """Renders a text, folded in a terminal."""
    return _rendered(Text(escape_controls(text)))


def number(value: float | int | None) -> str:
    """A number as text, with thousands separators from 10,000 on; `not counted` for None."""
    if value is None:
        return "not counted"
    if isinstance(value, int) or value.is_integer():
        return f"{int(value):,}" if abs(value) >= 10_000 else str(int(value))
    return f"{value:.6g}"


def size(count: float | None) -> str:
    """A number of bytes as text, such as `1.5 MiB`; `not counted` for None."""
    if count is None:
        return "not counted"
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.4g} {unit}"


def text_of(value: Any) -> str:
    """A plain value (number, text, mapping, list) on one line."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text_of(part)}" for key, part in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(text_of(part) for part in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


def is_terminal() -> bool:
    """Whether standard output is a terminal, for which tables have colours and its width."""
    return sys.stdout.isatty()


def _width() -> int:
    return shutil.get_terminal_size().columns if is_terminal() else _NO_LIMIT


def _rendered(content: Table | Text) -> str:
    """Renders to text, so that only writing it can fail."""
    terminal = is_terminal()
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=_width(),
        force_terminal=terminal or None,
        color_system="auto" if terminal or os.environ.get("FORCE_COLOR") else None,
        soft_wrap=False,
    )
    console.print(content)
    lines = stream.getvalue().splitlines()
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    return "".join(line.rstrip() + "\n" for line in lines)
