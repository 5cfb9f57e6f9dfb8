"""Makes the tests that packages have, all in this process: their runs are forked from the same fork servers.

Run as `python -m plugins.example_plugin_tests FOLDER...`; it prints pytest's results as a JSON list. The
backend `reference` is known, and the test of slow momentum with numbers, whose model is of Keras, left out.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
from helpers.shared_fork_servers import share_fork_servers

from isotrain.core.plugins import selection

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OF_AN_EXAMPLE = ("--import-mode=importlib", "--rootdir=.", "tests")
"""For packages that lie within this project, whose settings are not theirs."""


def said(folder: Path, *options: str) -> str:
    """What pytest says of the tests in a folder."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(folder):
        own = OF_AN_EXAMPLE if folder.is_relative_to(EXAMPLES) else ()
        code = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *own, *options])
    assert code == pytest.ExitCode.OK, out.getvalue()
    return out.getvalue()


if __name__ == "__main__":
    share_fork_servers(preloaded=("helpers.infrequent_gc",))
    with selection.using(["isotrain.testing.reference"], []):
        print(json.dumps([said(Path(each), "-k", "not is_momentum") for each in sys.argv[1:]]))
