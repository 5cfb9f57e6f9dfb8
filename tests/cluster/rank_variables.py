"""What one rank finds set: run by a launcher on every rank, it writes this into the folder it is given."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

if __name__ == "__main__":
    found = {"host": socket.gethostname(), "variables": dict(os.environ)}
    file = Path(sys.argv[1]) / f"{socket.gethostname()}-{os.getpid()}.json"
    file.write_text(json.dumps(found))
