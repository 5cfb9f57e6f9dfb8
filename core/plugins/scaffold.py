"""Creates the package of a new plugin from the files in `template`."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path
from string import Template

from isotrain.core.errors import PluginError, unknown_name
from isotrain.core.plugins.manager import plugin_manager

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
REGISTRIES = {
    "strategy": "strategies",
    "backend": "backends",
    "launcher": "launchers",
    "logger": "loggers",
}
"""Kind of plugin that can be created to its registry in the plugin manager."""
_TARGETS = {
    "pyproject.toml.txt": "pyproject.toml",
    "readme.md.txt": "README.md",
    "init.py.txt": "$module/__init__.py",
    "test.py.txt": "tests/test_$module.py",
}
"""Template file to target path, relative to the new package; other templates are modules of the package."""


def make_plugin(
    name: str, output: str | os.PathLike[str] | None = None, kind: str = "strategy"
) -> Path:
    """Creates a package with one plugin.

    Args:
        name: Name of the plugin: lower-case letters and digits, joined by hyphens.
        output: Folder of the package; left out: `isotrain-NAME`.
        kind: Kind of plugin, a key of `REGISTRIES`.

    Returns:
        The folder.

    Raises:
        PluginError: The kind is unknown, the name is invalid or taken, or the folder exists or cannot be
            written.
    """
    if kind not in REGISTRIES:
        raise PluginError(f"new-plugin: {unknown_name('kind of plugin', kind, REGISTRIES)}")
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"new-plugin: expected a name such as 'my-{kind}', of lower-case letters and digits joined by"
            f" hyphens; received {name!r}."
        )
    if name in getattr(plugin_manager(), REGISTRIES[kind]).names():
        raise PluginError(
            f"new-plugin: the {kind} {name!r} is already registered. Choose another name."
        )
    folder = Path(output or f"isotrain-{name}").expanduser()
    templates = resources.files("isotrain.core.plugins") / "template"
    values = _template_values(name, kind)
    try:
        folder.mkdir(parents=True)
        for source in (templates / "pyproject.toml.txt", *(templates / kind).iterdir()):
            module = f"$module/{source.name.removesuffix('.txt')}"
            target = Template(_TARGETS.get(source.name, module)).substitute(values)
            text = Template(source.read_text(encoding="utf-8")).substitute(values)
            (folder / target).parent.mkdir(exist_ok=True)
            (folder / target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PluginError(
            f"new-plugin: {folder} cannot be created: {error}. Choose another folder with --output."
        ) from error
    return folder


def _template_values(name: str, kind: str) -> dict[str, str]:
    words = name.split("-")
    return {
        "kind": kind,
        "name": name,
        "project": f"isotrain-{name}",
        "module": f"isotrain_{'_'.join(words)}",
        "class_name": "".join(word.capitalize() for word in words),
        "variable": "_".join(words).upper(),
    }
