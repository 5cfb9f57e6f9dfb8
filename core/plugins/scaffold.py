"""Makes the package of a new plugin from the texts in `template`."""

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
"""Template to where it goes."""


def make_plugin(name: str, directory: Path) -> Path:
    """Writes a package with one strategy.

    Args:
        name: Of the strategy: lower-case words and digits, joined by hyphens.
        directory: Where to make the package's folder, `isotrain-NAME`.

    Returns:
        The folder.

    Raises:
        PluginError: The name cannot be one or is taken, or the folder exists or cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"new-plugin: the name {name!r} is not of the form of 'my-strategy': lower-case letters and"
            " digits, joined by hyphens."
        )
    if name in plugin_manager().strategies.names():
        raise PluginError(
            f"new-plugin: there is a strategy {name!r} already, and two of one name are an error. Choose"
            " another name."
        )
    folder = directory.expanduser() / f"isotrain-{name}"
    texts = resources.files("isotrain.core.plugins") / "template"
    words = _words(name)
    try:
        folder.mkdir(parents=True)
        for template, target in _FILES.items():
            path = folder / Template(target).substitute(words)
            path.parent.mkdir(exist_ok=True)
            text = (texts / template).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(words), encoding="utf-8")
    except OSError as error:
        raise PluginError(
            f"new-plugin: {folder} cannot be made: {error}. Choose another place with --directory."
        ) from error
    return folder


def _words(name: str) -> dict[str, str]:
    return {
        "name": name,
        "project": f"isotrain-{name}",
        "module": f"isotrain_{name.replace('-', '_')}",
        "class_name": "".join(part.capitalize() for part in name.split("-")),
    }
