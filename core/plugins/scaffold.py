"""Creates the package of a new strategy plugin from the files in `template`."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from string import Template

from isotrain.core.errors import PluginError
from isotrain.core.plugins.manager import plugin_manager

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "readme.md.txt": "README.md",
    "init.py.txt": "$module/__init__.py",
    "strategy.py.txt": "$module/strategy.py",
    "test.py.txt": "tests/test_$module.py",
}
"""Template file to target path, relative to the new package."""


def make_plugin(name: str, directory: Path) -> Path:
    """Creates a package with one strategy.

    Args:
        name: Name of the strategy: lower-case letters and digits, joined by hyphens.
        directory: Parent of the package's folder, `isotrain-NAME`.

    Returns:
        The folder.

    Raises:
        PluginError: The name is invalid or taken, or the folder exists or cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"new-plugin: expected a name such as 'my-strategy', of lower-case letters and digits joined by"
            f" hyphens; received {name!r}."
        )
    if name in plugin_manager().strategies.names():
        raise PluginError(
            f"new-plugin: the strategy {name!r} is already registered. Choose another name."
        )
    folder = directory.expanduser() / f"isotrain-{name}"
    templates = resources.files("isotrain.core.plugins") / "template"
    values = _template_values(name)
    try:
        folder.mkdir(parents=True)
        for template, target in _FILES.items():
            path = folder / Template(target).substitute(values)
            path.parent.mkdir(exist_ok=True)
            text = (templates / template).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(values), encoding="utf-8")
    except OSError as error:
        raise PluginError(
            f"new-plugin: {folder} cannot be created: {error}. Choose another folder with --directory."
        ) from error
    return folder


def _template_values(name: str) -> dict[str, str]:
    return {
        "name": name,
        "project": f"isotrain-{name}",
        "module": f"isotrain_{name.replace('-', '_')}",
        "class_name": "".join(part.capitalize() for part in name.split("-")),
    }
