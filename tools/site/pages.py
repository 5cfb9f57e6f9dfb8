"""Pages of the site that are made from the repository: its files, programs side by side as tabs, references.

Needs no MkDocs: `hooks.py` hands it these texts. Paths are those of the repository, unless called site paths.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
HOME = "README.md"
_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")
_FENCE = re.compile(r"(^ *(?:````.*?^ *````|```.*?^ *```)$)", re.DOTALL | re.MULTILINE)
_TWINS = re.compile(
    r"<table>\n<tr><th>(.*?)</th><th>(.*?)</th></tr>\n<tr><td>\n(.*?)\n</td><td>\n(.*?)\n</td></tr>\n</table>",
    re.DOTALL,
)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh"}


def site_path(path: str) -> str:
    """Path within the site of a file or folder of the repository: `docs/spec.md` is `spec.md`."""
    if path == HOME:
        return "index.md"
    path = path.removeprefix("docs/")
    return path if path.endswith((".md", ".png", ".svg")) else f"{path}.md"


def linked_files(text: str, path: str) -> Iterator[str]:
    """Paths of the files and folders that a Markdown page links to."""
    for prose in _FENCE.split(text)[::2]:
        for target in _LINK.findall(prose):
            yield os.path.normpath(os.path.join(os.path.dirname(path), target))


def with_site_links(text: str, path: str) -> str:
    """A page's text whose links lead to pages of the site."""

    def moved(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(path), link[0]))
        return os.path.relpath(site_path(target), os.path.dirname(site_path(path)))

    parts = _FENCE.split(text)
    parts[::2] = [_LINK.sub(moved, prose) for prose in parts[::2]]
    return "".join(parts)


def with_tabs(text: str) -> str:
    """A page's text with its tables of two programs as tabs, and sections that have one as tabs too."""
    sections = re.split(r"^(?=## )", _TWINS.sub(_tabs, text), flags=re.MULTILINE)
    return "".join(
        _tab(*section.removeprefix("## ").split("\n", 1)) if "\n=== " in section else section
        for section in sections
    )


def _tabs(table: re.Match[str]) -> str:
    return _tab(table[1], table[3]) + _tab(table[2], table[4])


def _tab(title: str, content: str) -> str:
    indented = "\n".join(f"    {line}" if line else "" for line in content.strip().splitlines())
    return f'=== "{title}"\n\n{indented}\n\n'


def repository_page(path: str) -> str:
    """Markdown of a file or folder of the repository that a page links to."""
    file = ROOT / path
    if path.endswith(".md"):
        return file.read_text(encoding="utf-8")
    if file.is_dir():
        names = sorted(each.name for each in file.iterdir() if each.is_file())
        links = [f"* [{name}]({file.name}/{name})" for name in names if name != "__init__.py"]
        return f"# {path}\n\n" + "\n".join(links) + "\n"
    if file.suffix == ".ipynb":
        return _notebook(json.loads(file.read_text(encoding="utf-8")))
    language = _LANGUAGES.get(file.suffix, "text")
    return f"# {path}\n\n````{language}\n{file.read_text(encoding='utf-8').rstrip()}\n````\n"


def _notebook(notebook: Mapping[str, Any]) -> str:
    """Markdown of a notebook: its text, and its code in blocks."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    code = {"code": "```python\n{}\n```", "markdown": "{}"}
    return "\n\n".join(code[kind].format(source) for kind, source in cells) + "\n"


def repository_pages(pages: Iterable[str]) -> dict[str, str]:
    """Markdown by path of everything outside of `docs` that pages link to, and what that links to."""
    texts: dict[str, str] = {}
    pending = [HOME, "CHANGELOG.md", *pages]
    while pending:
        page = pending.pop()
        text = repository_page(page)
        if not page.startswith("docs/"):
            texts[page] = text
        pending += {
            path
            for path in linked_files(text, page)
            if path not in texts and not path.startswith("docs/")
        }
    return texts


def command_line_page() -> str:
    """Reference of all commands and options, from the program's parser."""
    from isotrain.core.cli.app import parser

    program = parser()
    lines = [
        "# Commands and options",
        "",
        "```sh",
        "isotrain run SPEC --backend B --replicas N",
        "```",
        "",
    ]
    lines += ["[The command line](../command-line.md) says what they mean together."]
    for name, command in _subcommands(program).items():
        lines += ["", f"## {name}", "", *_command(f"isotrain {name}", command)]
    return "\n".join(lines) + "\n"


def _command(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    """Lines on a command: what it does, its arguments and examples, then its own commands."""
    yield command.description or ""
    nested = _subcommands(command)
    rows = [
        (_argument(action), _plain((action.help or "") % {**vars(action), "prog": command.prog}))
        for action in command._actions
        if action.help != argparse.SUPPRESS
        and action.dest != "help"
        and action.choices is not nested
    ]
    if rows:
        yield from _table(("argument", "what it is"), rows)
    if command.epilog:
        yield from ("", "```text", command.epilog.rstrip(), "```")
    for part, parser in nested.items():
        yield from ("", f"### {name.removeprefix('isotrain ')} {part}", "", *_command(part, parser))


def _subcommands(command: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _argument(action: argparse.Action) -> str:
    """An argument as it is written, such as `--replicas N`."""
    names = ", ".join(action.option_strings)
    value = action.metavar or (
        f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    )
    value = value or ("" if action.nargs == 0 else action.dest.upper())
    return f"`{' '.join(filter(None, (names, str(value))))}`"


def spec_page() -> str:
    """Reference of all fields of a spec, from its JSON Schema."""
    from isotrain.core.spec.loading import json_schema

    schema = json_schema()
    lines = [
        "# Fields of a spec",
        "",
        "```sh",
        "isotrain schema  # the JSON Schema that this page is made from",
    ]
    lines += ["```", "", "[Specs](../spec.md) explains them with examples.", ""]
    lines += _fields(schema)
    for name, section in sorted(schema["$defs"].items()):
        lines += ["", f"## {name}", "", section.get("description", ""), ""]
        lines += _fields(section) if "properties" in section else [_type(section)]
    return "\n".join(lines) + "\n"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    rows = [
        (
            f"`{name}`",
            _type(field),
            "*required*" if name in required else _code(field.get("default")),
            _plain(field.get("description", "")),
        )
        for name, field in schema["properties"].items()
    ]
    return _table(("field", "value", "default", "what it is"), rows)


def _type(schema: Mapping[str, Any]) -> str:
    """Type of a value in words, with links to sections of the page."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return _code(schema["const"])
    if "enum" in schema:
        return " or ".join(map(_code, schema["enum"]))
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[union])))
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    kinds = schema.get("type", "any value")
    return " or ".join([kinds] if isinstance(kinds, str) else kinds)


def _code(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _plain(text: str) -> str:
    """Text whose brackets make no link."""
    return text.replace("[", r"\[")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield from ("", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    for row in rows:
        cells = (re.sub(r"\s+", " ", cell).replace("|", r"\|") for cell in row)
        yield f"| {' | '.join(cells)} |"


def api_page(module: ModuleType) -> str:
    """Reference of a module's public names but constants, which mkdocstrings fills in."""
    sections: dict[str, list[str]] = {"Functions and modules": [], "Classes": [], "Errors": []}
    for name in (name for name in module.__all__ if not name.isupper()):
        kind = "Functions and modules" if name.islower() else "Classes"
        sections["Errors" if name.endswith("Error") else kind].append(name)
    lines = [f"# {module.__name__}", "", "```python", f"import {module.__name__}", "```", ""]
    lines.append("[The public interface](../api.md) groups these names by use.")
    for title, names in sections.items():
        lines += ["", f"## {title}", *(f"\n::: {module.__name__}.{name}" for name in names)]
    return "\n".join(lines) + "\n"


def reference_pages() -> dict[str, str]:
    """Reference pages by path within the site, from the parser, the schema and the public names."""
    import isotrain.plugin

    return {
        "reference/commands.md": command_line_page(),
        "reference/spec-fields.md": spec_page(),
        "reference/isotrain.md": api_page(isotrain),
        "reference/isotrain-plugin.md": api_page(isotrain.plugin),
    }


def first_sentence(markdown: str) -> str:
    """First sentence of a page after its title, without links."""
    prose = "".join(_FENCE.split(markdown)[::2])
    paragraph = next((part for part in prose.split("\n\n") if re.match(r"\s*[\[\w]", part)), "")
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return re.split(r"(?<=[.:]) ", plain)[0]
