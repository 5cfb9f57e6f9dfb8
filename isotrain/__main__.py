"""The command line: `python -m isotrain` and `isotrain`."""

from __future__ import annotations

import sys

from isotrain.core.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
