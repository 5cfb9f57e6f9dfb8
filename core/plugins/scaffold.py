"""Creates the package of a new plugin from the files in `template`."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from string import Template

from isotrain.core.errors import PluginError, unknown_name
from isotrain.core.plugins.manager import plugin_manager

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
REGISTRIES = {"strategy": "strategies", "launcher": "launchers", "logger": "loggers"}
"""Kind of plugin that can be created to its registry in the plugin manager."""
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "$kind/readme.md.txt": "README.md",
    "$kind/init.py.txt": "$module/__init__.py",
    "$kind/$kind.py.txt": "$module/$kind.py",
    "$kind/test.py.txt": "tests/test_$module.py",
}
"""Template file to target path, relative to the new package."""


def make_plugin(name: str, directory: Path, kind: str = "strategy") -> Path:
    """Creates a package with one plugin.

    Args:
        name: Name of the plugin: lower-case letters and digits, joined by hyphens.
        directory: Parent of the package's folder, `isotrain-NAME`.
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
    folder = directory.expanduser() / f"isotrain-{name}"
    templates = resources.files("isotrain.core.plugins") / "template"
    values = _template_values(name, kind)
    try:
        folder.mkdir(parents=True)
        for template, target in _FILES.items():
            path = folder / Template(target).substitute(values)
            path.parent.mkdir(exist_ok=True)
            source = templates / Template(template).substitute(values)
            text = source.read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(values), encoding="utf-8")
    except OSError as error:
        raise PluginError(
            f"new-plugin: {folder} cannot be created: {error}. Choose another folder with --directory."
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
