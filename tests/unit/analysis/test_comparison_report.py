"""The report of a comparison: what its page holds, and that its plots are what they should be."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.html_page import Page
from unit.analysis import comparison_samples as samples

from isotrain.analysis.compare.plots import curves, dot_plots
from isotrain.analysis.compare.plots.registry import plots_of
from isotrain.analysis.compare.plots.series import series_of, styles_of
from isotrain.analysis.compare.records import Estimate
from isotrain.analysis.compare.report import headline
from isotrain.analysis.compare.report import html as pages
from isotrain.analysis.compare.report import tables as report_tables
from isotrain.analysis.compare.report.html import render
from isotrain.analysis.compare.summary import largest_difference
from isotrain.analysis.compare.verdict import likeness, load_warning
from isotrain.analysis.pages import canvas, timeline, units
from isotrain.analysis.pages import page as html_page
from isotrain.analysis.pages.plot import Plot
from isotrain.core.errors import IsotrainError
from isotrain.core.system.trace_events import Span

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports") / "new"
    assert pages.write_report(samples.typical(), folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def hostile() -> str:
    return render(samples.hostile())


@pytest.mark.slow
def test_headings_go_down_one_level_at_a_time(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


@pytest.mark.slow
def test_every_table_has_a_caption_and_scopes(page: Page) -> None:
    assert len(page.of("caption")) == len(page.of("table")) > 10
    assert all(head.get("scope") in ("col", "row") for head in page.of("th"))


@pytest.mark.slow
def test_the_page_has_a_language_and_a_skip_link(page: Page) -> None:
    assert page.of("html") == [{"lang": "en"}]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids)), "an id is there twice"
    links = [str(link["href"]) for link in page.of("a")]
    assert links[0] == "#main"
    assert {link.removeprefix("#") for link in links} <= set(ids)


@pytest.mark.slow
def test_every_plot_has_a_text_alternative(page: Page) -> None:
    drawings = page.of("svg")
    assert len(drawings) == 12
    ids = {attributes.get("id") for _, attributes in page.elements}
    for svg in drawings:
        assert svg["role"] == "img"
        assert {svg["aria-labelledby"], svg["aria-describedby"]} <= ids
    assert "horovod-tf:gloo@4 6,951 samples/s (6,812 to 7,091)" in page.text


@pytest.mark.slow
def test_nothing_is_loaded_from_anywhere(page: Page) -> None:
    assert not page.of("script")
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "base")
        for name in ("src", "href", "xlink:href", "action", "poster"):
            assert (attributes.get(name) or "#").startswith("#")
    style = "".join(data for tag, data in page.texts if tag == "style")
    assert "@import" not in style
    assert "url(" not in style


@pytest.mark.slow
def test_every_cell_is_a_row_with_the_full_reason_if_it_failed(page: Page) -> None:
    for cell in samples.typical().cells:
        assert cell.name in page.text
    assert " ".join(samples.TRACEBACK.split()) in page.text
    assert "A tie of 2: horovod-tf:gloo@4, torch-ddp:gloo@4" in page.text
    assert page.text.count(" tie ") >= 2


@pytest.mark.slow
def test_the_headline_has_speed_and_likeness_and_the_command() -> None:
    cells = [samples.cell("torch-ddp", 1), samples.cell("tf-mirrored", 1)]
    record = samples.comparison(cells, samples.Verdict("tf-mirrored@1", [], "Fastest."))
    text = Page(render(record)).text
    assert "Fastest: tf-mirrored@1, 1.32 times the next; all losses are alike to " in text
    assert "isotrain compare digits.json --repeats 3 --steps 200 --seed 0" in text
    assert "a step takes 21.9 ms" in text
    assert "Not alone" not in text
    assert likeness([replace(cell, loss_difference=0.0) for cell in cells]) == (
        "all losses are equal to the last digit"
    )
    assert likeness([replace(cell, loss_difference=0.25) for cell in cells]) == (
        "losses differ by up to 25.0%"
    )


def test_the_command_has_every_option_of_the_measurement() -> None:
    cells = [samples.cell("torch-ddp", 1), samples.cell("tf-mirrored", 1)]
    record = samples.comparison(cells, samples.Verdict("tf-mirrored@1", [], "Fastest."))
    settings = {"time_budget_s": 10800.0, "run_seconds": 1.5, "interpreters": {"tf-mirrored": "py"}}
    options = " --time-budget 10800s --run-limit 1.5s --reference tf-mirrored@1 --interpreter"
    compared = replace(record, settings=settings, reference="tf-mirrored@1")
    assert f"{options} tf-mirrored=py" in headline.command(compared)
    default = {**settings, "run_seconds": 60.0, "interpreters": {}}
    first = replace(record, settings=default, reference="torch-ddp@1")
    assert headline.command(first).endswith(" --time-budget 10800s")


@pytest.mark.slow
def test_a_busy_machine_is_warned_of() -> None:
    cell = samples.cell("torch-ddp", 1)
    busy = [replace(cell.repeats[0], others_cores=1.3), replace(cell.repeats[1], others_cores=0.1)]
    record = samples.comparison([replace(cell, repeats=busy)], samples.single().verdict)
    record = replace(record, machine={**record.machine, "cores": 2})
    warning = "Other programs kept up to 1.3 of 2 cores busy just before 1 of 2 runs."
    assert warning in Page(render(record)).text
    assert load_warning(record.cells, 16) is None


@pytest.mark.slow
def test_the_page_has_no_folders() -> None:
    cell = samples.cell("torch-ddp", 1)
    cell = replace(cell, plan={**cell.plan, "notes": ["read from /home/me/x/data.npz:train"]})
    record = samples.comparison([cell], samples.single().verdict)
    spec = {"model": "/home/me/x/digits.py:model", "url": "s3://bucket/folder/file"}
    html = render(replace(record, spec=spec))
    assert "/home/me" not in html
    assert "Trained model: digits.py:model" in html
    assert "s3://bucket/folder/file" in html


@pytest.mark.slow
def test_too_few_runs_are_not_called_a_tie() -> None:
    cells = [samples.cell("torch-ddp", count, repeats=2) for count in (1, 2)]
    verdict = samples.Verdict(None, [cell.name for cell in cells], "Two runs of each.")
    found = Page(render(samples.comparison(cells, verdict)))
    assert "Too few runs to tell which is fastest" in found.text
    assert "A tie of" not in found.text
    assert not any(given.get("class") == "mark tie" for _, given in found.elements)


@pytest.mark.slow
def test_texts_of_records_are_escaped(hostile: str) -> None:
    found = Page(hostile)
    assert not found.of("script")
    assert "<script" not in hostile
    assert "<script>alert(1)</script> & \"quoted\" 'text' $\\frac{$ ]]> url(#x)" in found.text


@pytest.mark.slow
def test_every_plot_is_a_sound_svg_and_png(folder: Path) -> None:
    found = sorted(path.name for path in (folder / "plots").iterdir())
    names = ("loss", "memory", "scaling", "step-times", "throughput", "timeline")
    assert found == sorted(f"{name}.{ending}" for name in names for ending in ("png", "svg"))
    from PIL import Image

    for name in names:
        root = ElementTree.parse(folder / "plots" / f"{name}.svg").getroot()
        assert root.tag.endswith("}svg")
        assert "var(" not in (folder / "plots" / f"{name}.svg").read_text(encoding="utf-8")
        with Image.open(folder / "plots" / f"{name}.png") as image:
            image.load()
            assert image.width == 2 * (canvas.WIDE + 36)
            assert len(image.convert("RGB").getcolors(1 << 20) or []) > 20, "nothing is drawn"


@pytest.mark.slow
def test_the_same_comparison_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    pages.write_report(samples.typical(), tmp_path)
    files = [path.relative_to(folder) for path in folder.rglob("*.*")]
    assert len(files) > 10
    for file in files:
        assert (folder / file).read_bytes() == (tmp_path / file).read_bytes(), file


@pytest.mark.slow
def test_the_trace_has_a_process_per_cell_and_a_thread_per_rank(folder: Path) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    cells = [cell for cell in samples.typical().cells if cell.timeline]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == [cell.name for cell in cells]
    spans = [each for each in events if each["ph"] == "X" and each["pid"] == 1]
    assert [each["name"] for each in spans] == [span.name for span in cells[1].timeline]
    assert [each["tid"] for each in spans] == [int(s.track[5:]) for s in cells[1].timeline]
    assert spans[1]["dur"] == pytest.approx(1e6 * cells[1].timeline[1].seconds)


@pytest.mark.slow
def test_plots_of_an_earlier_report_are_removed(tmp_path: Path) -> None:
    old = tmp_path / "plots" / "scaling.svg"
    old.parent.mkdir()
    old.write_text("old")
    pages.write_report(samples.none_finished(), tmp_path)
    assert list(old.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("a file")
    with pytest.raises(IsotrainError, match=re.escape(str(tmp_path))):
        pages.write_report(samples.none_finished(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none_finished", "broken_numbers"])
def test_missing_figures_are_noted(name: str) -> None:
    text = Page(render(samples.ALL[name]())).text
    if name == "none_finished":
        assert "No cell has finished" in text
        assert "No cell has a throughput to draw." in text
    else:
        assert "not a number" in text
        assert "not measured" in text
        assert "nan" not in re.findall(r"\w+", text)


def test_an_interrupted_comparison_says_so() -> None:
    plain = replace(samples.interrupted(), cells=[samples.skipped("tf-mirrored", 2)])
    text = Page(render(plain)).text
    assert "Not complete." in text
    assert "The comparison was interrupted before its first run." in text


@pytest.mark.slow
def test_plots_with_control_characters_are_valid() -> None:
    cell = replace(samples.cell("torch-ddp", 1), name="_bad\x1b[31m\x00\ud800@1")
    plots = plots_of(samples.comparison([cell], samples.single().verdict))
    for plot in plots:
        if plot.draw is not None:
            ElementTree.fromstring(canvas.svg_file(plot.draw, plot.title, plot.summary).encode())


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_what_to_do(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (package, "matplotlib.style"):
        if name.startswith(package):
            monkeypatch.setitem(sys.modules, name, None)
    html_page.template_environment.cache_clear()
    with pytest.raises(IsotrainError, match=rf"{package}.*pip install jinja2 matplotlib"):
        render(samples.single())


def test_importing_the_report_loads_nothing_heavy() -> None:
    program = (
        "import isotrain.analysis.compare.result, sys;"
        "print([n for n in ('jinja2', 'matplotlib', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def plot(name: str) -> Plot:
    return next(plot for plot in plots_of(samples.typical()) if plot.name == name)


def test_plots_have_their_figures_as_tables() -> None:
    cells = samples.typical().cells
    assert plot("throughput").rows[0][:2] == ("horovod-tf:gloo@4", "6,951")
    assert len(plot("throughput").rows) == len(cells) - 1
    assert ("torch-ddp:gloo", "4", "2.96", "2.87 to 3.05", "74 %") in plot("scaling").rows
    assert plot("loss").rows[0][-1] == "reference"
    assert plot("timeline").rows[0] == ("torch-ddp@1", "input", "1.45", "5 %")
    assert plot("memory").rows[0] == ("torch-ddp@1", "0.407", "0.407")


def test_series_share_the_cell_with_one_replica() -> None:
    cells = [samples.cell("torch-ddp", n) for n in (1, 2)]
    cells.append(replace(cells[1], name="torch-ddp:mpi@2", collective="mpi"))
    found = {series.label: [c.replicas for c in series.cells] for series in series_of(cells)}
    assert found == {"torch-ddp:gloo": [1, 2], "torch-ddp:mpi": [1, 2]}


def test_no_two_cells_look_the_same() -> None:
    looks = styles_of(samples.many().cells)
    assert len(looks) == 32
    assert len({(look.color, look.marker, look.dash) for look in looks.values()}) == 32
    assert len({(look.marker, look.dash) for look in looks.values()}) == 32, "only colour differs"


def test_differences_are_relative_to_the_larger_in_table_and_plot() -> None:
    one = replace(samples.cell("torch-ddp", 1), losses=[2.0, 4.0, float("nan"), 0.0])
    two = replace(one, losses=[2.0, 5.0, 1.0, 1.0, 7.0])
    assert str(curves.differences(two, one)) == "[0.0, 0.2, inf, 1.0]"
    assert largest_difference(replace(one, losses=[1.0]), replace(one, losses=[2.0])) == 0.5


def test_overlapping_spans_get_lanes_of_their_own() -> None:
    spans = [Span("r", "a", 0, 2), Span("r", "b", 1, 2), Span("r", "c", 2, 1), Span("r", "d", 3, 1)]
    lanes = timeline.lanes(spans)
    assert [[span.name for span in lane] for lane in lanes] == [["a", "c", "d"], ["b"]]


def test_many_blocks_are_thinned_between_their_ends() -> None:
    kept = dot_plots.thinned([float(value) for value in range(1000)])
    assert len(kept) == 60
    assert (kept[0], kept[-1]) == (0.0, 999.0)


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("seconds", [0.0289, 0.0168], ["28.9 ms", "16.8 ms"]),
        ("seconds", [3.2, 0.0004], ["3.20000 s", "0.00040 s"]),
        ("bytes", [1.5 * 2**30, 2.0**29], ["1.500 GiB", "0.500 GiB"]),
        ("rate", [12345.6, 987.6], ["12,346 samples/s", "988 samples/s"]),
        ("percent", [0.743], ["74.3 %"]),
        ("bytes/s", [1.4e9], ["1.40 GB/s"]),
        ("difference", [3.14e-7, 0.0], ["3.1 × 10⁻⁷", "0"]),
        ("loss", [0.254697, 0.2547], ["0.254697", "0.254700"]),
        ("loss", [0.9461], ["0.9461"]),
        ("plain", [float("nan"), float("inf"), 1.0], ["not a number", "∞", "1.00"]),
        ("plain", [0.0], ["0.00"]),
        ("plain", [-2.0], ["−2.00"]),
    ],
)
def test_numbers_of_a_column_have_one_unit(
    kind: units.Kind, values: list[float], told: list[str]
) -> None:
    unit = units.unit_of(kind, values)
    assert [unit.full(value) for value in values] == told


def test_versions_name_their_cells() -> None:
    cells = [samples.cell("torch-ddp", 1), samples.cell("tf-mirrored", 1)]
    assert report_tables.versions(cells) == [
        ("keras", "3.15.1", "all"),
        ("numpy", "2.4.6", "all"),
        ("tensorflow", "2.21.0", "tf-mirrored@1"),
        ("torch", "2.13.0", "torch-ddp@1"),
    ]


def test_an_empty_interval_is_not_written() -> None:
    cell = replace(samples.cell("torch-ddp", 1), speedup=Estimate(1.0, float("nan"), 2.0))
    speed = report_tables.groups([cell])[0]
    column = [label for label, _ in speed.heads].index("speedup")
    assert speed.rows[cell.name][column] == report_tables.TableEntry("1.00", "")


@pytest.mark.slow
def test_templates_and_style_sheet_are_in_the_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, tracked):
        if not (ROOT / name).is_symlink() and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    pages = ROOT / "analysis" / "pages"
    for path in (*pages.glob("*.jinja"), *pages.glob("*.css")):
        assert f"isotrain/analysis/pages/{path.name}" in names
    templates = {path.relative_to(ROOT) for path in (ROOT / "core/plugins/template").rglob("*.txt")}
    assert {f"isotrain/{path}" for path in templates} <= {*names}
