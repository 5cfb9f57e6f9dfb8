"""The notebook of first steps runs in a real kernel, and shows what it says."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_steps.ipynb"
CODE_CELLS = [
    "".join(cell["source"])
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]

SHOWN = ("stream", "display_data", "update_display_data", "execute_result")
"""Kinds of messages that a notebook shows."""


def outputs_of_cells(folder: Path) -> list[list[dict[str, Any]]]:
    """What each code cell shows, as contents of messages, in a kernel whose current folder is `folder`."""
    manager = pytest.importorskip("jupyter_client.manager")
    outputs: list[list[dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="kernel-") as sockets:  # whose names must be short
        kernel = manager.KernelManager(transport="ipc", ip=f"{sockets}/kernel")
        kernel.start_kernel(cwd=str(folder))
        client = kernel.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=120)
            for source in CODE_CELLS:
                messages: list[dict[str, Any]] = []
                reply = client.execute_interactive(source, timeout=200, output_hook=messages.append)
                assert reply["content"]["status"] == "ok", reply["content"]
                outputs.append([m["content"] for m in messages if m["msg_type"] in SHOWN])
        finally:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)
    return outputs


@pytest.mark.examples
def test_the_notebook_of_first_steps_runs(tmp_path: Path) -> None:
    outputs = outputs_of_cells(tmp_path)
    definition, drawing, trained, parity, comparison, interrupted, resumed = outputs
    assert definition == drawing == []
    bars = [html for html in shown(trained, "text/html") if "<progress" in html]
    assert "step 380 of 380" in bars[-1]
    assert len(shown(trained, "image/svg+xml")) == 20
    assert "<table" in shown(parity, "text/html")[-1]
    assert "rounding" in shown(parity, "text/html")[-1]
    assert "<table" in shown(comparison, "text/html")[-1]
    assert "to go on: isotrain resume" in text(interrupted)
    assert 0 < len(shown(resumed, "image/svg+xml")) < 20
    resumed_loss, first_loss = re.findall(r"\d+\.\d+", text(resumed))
    assert float(resumed_loss) == pytest.approx(float(first_loss), abs=2e-4)


def shown(outputs: list[dict[str, Any]], mime_type: str) -> list[str]:
    """What the outputs of a cell show in one format."""
    return [output["data"][mime_type] for output in outputs if mime_type in output.get("data", {})]


def text(outputs: list[dict[str, Any]]) -> str:
    """Standard output among the messages of a cell."""
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")
