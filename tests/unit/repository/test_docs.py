"""The documents say what the code says: the table of strategies, the hooks, the plugin, the links."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isotrain.core.cli.app import parser
from isotrain.core.cli.argument_types import name_with_options
from isotrain.core.cli.parser import UsageError
from isotrain.core.launching.run_directory.run_directory import RUNS_VARIABLE, SPEC_FILE
from isotrain.core.planning import launcher_support, listings
from isotrain.core.plugins import hookspecs
from isotrain.core.plugins.manager import PLUGINS_VARIABLE, PluginManager
from isotrain.core.reporting import launcher_text, tables
from isotrain.core.reporting import text as texts
from isotrain.core.spec.sections import Timeouts
from isotrain.testing import backend, strategy
from isotrain.testing.commands import checks_text

ROOT = Path(__file__).parents[3]
PLUGINS = ROOT / "docs" / "plugins.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(
        page
        for folder in ("docs", "examples", "adapters")
        for page in sorted((ROOT / folder).rglob("*.md"))
    ),
]
_COMPARISONS = {"check", "check_weights", "plain", "plain_losses"}
"""Functions of the examples' tests that train the plain program."""
HOOKS = [function for name, function in vars(hookspecs).items() if name.startswith("isotrain_")]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """Knows what comes with isotrain, whatever else is installed or asked for here."""
    monkeypatch.delenv(PLUGINS_VARIABLE, raising=False)
    return PluginManager(entry_points=False)


def test_the_page_has_the_printed_table_of_strategies(
    host: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "is_terminal", lambda: False)
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    found = re.findall(r"<!-- strategies -->\n(.*?)<!-- /strategies -->", text, re.DOTALL)
    assert found == [texts.strategies(listings.strategies(host))]


def test_the_page_says_of_every_strategy_whether_it_is_elastic(host: PluginManager) -> None:
    """Each row has a strategy with its options, as on the command line, and the reason that it gives."""
    page = (ROOT / "docs" / "resuming.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- elastic strategies -->\n(.*?)<!-- / -->", page, re.DOTALL)
    names = set()
    for row in table.splitlines()[2:]:
        _, choice, found, _ = (part.strip() for part in row.split("|"))
        strategy = host.strategy(**name_with_options(choice.strip("`")))
        reason = strategy.why_not_elastic()
        yes = "yes" if strategy.is_savepoint(0) is None else "yes, from a savepoint"
        assert found == (yes if reason is None else f"no: {reason}"), choice
        names.add(strategy.name)
    assert names == set(host.strategies.names())


def test_the_page_has_the_printed_table_of_launchers(
    host: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "is_terminal", lambda: False)
    page = (ROOT / "docs" / "launching" / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"<!-- launchers -->\n(.*?)<!-- /launchers -->", page, re.DOTALL)
    anywhere = [{**each, "available": True} for each in launcher_support.launchers(host)]
    assert found == [launcher_text.launchers(anywhere, launcher_support.environments(host))]


@pytest.mark.parametrize(
    ("kind", "checks"), [("backend", backend.CHECKS), ("strategy", strategy.CHECKS)]
)
def test_every_conformance_check_is_documented(
    kind: str, checks: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "is_terminal", lambda: False)
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    found = re.findall(rf"<!-- {kind} checks -->\n(.*?)<!-- / -->", page, re.DOTALL)
    assert found == [checks_text(checks)]


def test_every_option_of_every_strategy_is_documented(host: PluginManager) -> None:
    text = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## ([\w-]+)$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    for name in host.strategies.names():
        for option in inspect.signature(host.strategies.get(name)).parameters:
            assert f"`{option}`" in sections[name], f"{name}: {option}"


def signature(function: Callable[..., Any]) -> str:
    """A hook as it is declared, in one line."""
    found = inspect.signature(function)
    given = ", ".join(f"{p.name}: {p.annotation}" for p in found.parameters.values())
    return f"{function.__name__}({given}) -> {found.return_annotation}"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_every_hook_is_documented(hook: Callable[..., Any]) -> None:
    assert f"`{signature(hook)}`" in PLUGINS.read_text(encoding="utf-8")


def test_no_other_hooks_are_documented() -> None:
    named = set(re.findall(r"`(isotrain_\w+)\(", PLUGINS.read_text(encoding="utf-8")))
    assert named == {hook.__name__ for hook in HOOKS}


def code(language: str) -> str:
    """The one block of the page on plugins that is in this language."""
    text = PLUGINS.read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return str(found)


class Group:
    """Stands for a replica group, and only notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def local_step(self, batch: Any, learning_rate: float) -> float:
        self.asked.append("step")
        return 1.0

    def average_parameters(self) -> None:
        self.asked.append("average")


def test_the_plugin_of_the_page_registers_and_runs(host: PluginManager) -> None:
    module = types.ModuleType("periodic_averaging")
    exec(compile(code("python"), str(PLUGINS), "exec"), module.__dict__)
    host.add(module)
    (listed,) = (s for s in listings.strategies(host) if s["name"] == "periodic-averaging")
    assert all(pair["supported"] for pair in listed["backends"].values())
    strategy, group = host.strategy("periodic-averaging", {"every": 2}), Group()
    for step in range(4):
        batch: Any = types.SimpleNamespace(step=step)
        assert strategy.step(group, batch, 0.1) == 1.0  # type: ignore[arg-type]
    assert group.asked == ["step", "step", "average", "step", "step", "average"]
    assert strategy.exchanged_bytes(100, 2) == 50.0


def test_the_package_of_the_page_has_the_right_entry_point() -> None:
    project = tomllib.loads(code("toml"))["project"]
    assert list(project["entry-points"]) == [hookspecs.PROJECT]
    assert f"{PLUGINS_VARIABLE}=" in code("sh")


def links(page: Path) -> Iterator[str]:
    """Targets of a page's links to files and headings; code is left out."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_links_are_found() -> None:
    assert len(list(links(ROOT / "README.md"))) >= 5


EXAMPLES = ROOT / "examples"
PROGRAM = parser()
SHOWING = [*PAGES, *sorted(EXAMPLES.glob("*.yaml"))]
COMMAND = re.compile(rf"(?:^|[\s/])isotrain ((?:{'|'.join(PROGRAM.commands)})\b[^#|;>\n]*)", re.M)
BLOCK = re.compile(r"^```\w*\n(.*?)^```$|^# +(isotrain .*?)$", re.DOTALL | re.MULTILINE)
MENTION = re.compile(r"`(isotrain [^`\n]+)`")


def wrong_with(command: str) -> str:
    """What the program's own parser says against a command that lacks the program's name."""
    words = shlex.split(re.sub(r"\[.*?\]", "", command))
    try:
        PROGRAM.parse_args(["2" if word == "N" else word for word in words])
    except UsageError as error:
        return str(error)
    return ""


def commands(pattern: re.Pattern[str], text: str) -> list[str]:
    """The commands in the parts of a text that match."""
    parts = ["".join(filter(None, found.groups())) for found in pattern.finditer(text)]
    return [command for part in parts for command in COMMAND.findall(part.replace("\\\n", ""))]


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one run, which commands call `last`."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / SPEC_FILE).write_text("{}", encoding="utf-8")
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))


@pytest.mark.parametrize("page", SHOWING, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_command_of_a_page_is_one(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for command in commands(BLOCK, text):
        assert not wrong_with(command)
    for mention in commands(MENTION, text):  # a sentence may leave out what it is not about
        assert wrong_with(mention).partition(":")[0] in ("", "the following arguments are required")


@pytest.mark.parametrize("name", [None, *PROGRAM.commands])
def test_every_command_of_the_help_is_one(name: str | None) -> None:
    described = PROGRAM.commands[name] if name else PROGRAM
    found = COMMAND.findall((described.epilog or "").replace("\\\n", ""))
    assert found
    for command in found:
        assert not wrong_with(re.split(r"\s{3,}[a-z]", command)[0])


def test_commands_are_found() -> None:
    pages = [page.read_text(encoding="utf-8") for page in SHOWING]
    assert sum(len(commands(BLOCK, text)) for text in pages) >= 20
    assert sum(len(commands(MENTION, text)) for text in pages) >= 20
    assert "Did you mean '--repeats'" in wrong_with("compare digits.yaml --repeat 3")


def test_documented_time_limits_are_those_of_the_code() -> None:
    limits = {name: f"{seconds:g}" for name, seconds in Timeouts().model_dump().items()}
    given = ", ".join(f"{name}: {seconds}" for name, seconds in limits.items())
    assert f"timeouts: {{{given}}}" in (ROOT / "docs" / "failures.md").read_text()
    row = f"| `timeouts` | {', '.join(limits.values())} s |"
    assert row in (ROOT / "docs" / "spec.md").read_text()


PRIVATE_WORDS = (
    r"\b(doors?|seals?|part(y|ies)|chairs?|doorsteps?|estranged|ledgers?|workforce|parted|staged|served|seats?"
    r"|arranging|course|equipment|dialects?|starters?|remarks?|engines?|told_work|joined run)\b"
)
"""What isotrain once called things that the field has words for; `docs/glossary.md` has those."""


def test_public_names_and_pages_use_the_words_of_the_field() -> None:
    listed = Path(__file__).with_name("public_api.txt").read_text(encoding="utf-8")
    names = re.sub(r"[_.]|(?<=[a-z])(?=[A-Z])", " ", listed)
    texts_by_name = {"public_api.txt": names, **{str(page): words(page) for page in PAGES}}
    for where, content in texts_by_name.items():
        found = re.search(PRIVATE_WORDS, content, re.IGNORECASE)
        assert not found, f"{where}: {found}"


def words(page: Path) -> str:
    """The prose of a page: without what the program prints, code and tables."""
    text = re.sub(
        r"<!-- (\w[\w ]*) -->.*?<!-- /\w* ?-->",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`]*`", "code", re.sub(r"^ *\|.*$", "", text, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_readable_in_a_terminal(page: Path) -> None:
    """A sentence has at most 35 words, a paragraph or item 100, and a line 120 columns."""
    text = words(page)
    assert not [line for line in text.splitlines() if len(line) > 120]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
        assert len(plain.split()) <= 100, plain
        for sentence in re.split(r"(?<=[.!?:])\s+", plain):
            assert len(sentence.split()) <= 35, sentence


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_a_page_begins_with_an_example(page: Path) -> None:
    """A command or a few lines of code are within the first 15 lines."""
    assert "\n```" in "\n".join(page.read_text(encoding="utf-8").splitlines()[:15])


def test_the_needs_are_the_questions_of_the_examples() -> None:
    """Each example in `by_need/` is in docs/needs.md once, under the question with which it begins."""
    page = (ROOT / "docs" / "needs.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"\[([^\]]*\?)\]\(\.\./(examples/by_need/\w+\.py)\)", page))
    examples = {
        (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]: str(
            path.relative_to(ROOT)
        )
        for path in (ROOT / "examples" / "by_need").glob("*.py")
    }
    assert listed == examples
    assert page.count("](../examples/by_need/") == len(examples)


def test_every_example_is_compared_with_a_plain_program() -> None:
    """Each in `by_need/` has a test that `cells` runs on each of its backends with one and two replicas."""
    compared = [
        name
        for path in sorted((ROOT / "tests" / "examples" / "by_need").glob("test_*.py"))
        for name in _compared_examples(ast.parse(path.read_text(encoding="utf-8")))
    ]
    examples = {path.stem for path in (ROOT / "examples" / "by_need").glob("*.py")}
    assert examples - set(compared) == set()


def _compared_examples(module: ast.Module) -> Iterator[str]:
    """Examples that a test file trains in all of its cells, and compares with a plain program."""
    constants = {
        target.id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for test in module.body:
        if not isinstance(test, ast.FunctionDef):
            continue
        called = {_called(each) for each in ast.walk(test)}
        used = {each.id for each in ast.walk(test) if isinstance(each, ast.Name)}
        if not called & _COMPARISONS or not {"backend", "replicas"} <= used:
            continue
        for decorator in test.decorator_list:
            if isinstance(decorator, ast.Call) and _called(decorator) == "cells":
                (name,) = decorator.args
                yield constants[name.id] if isinstance(name, ast.Name) else ast.literal_eval(name)


def _called(node: ast.AST) -> str | None:
    """Name of the function that a node calls; None for any other node."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id
    return None
