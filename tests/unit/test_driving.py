"""What an engine is given to start on every rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from isotrain.core.contracts.plugin_choice import PluginChoice
from isotrain.core.launching.driving import rank_command
from isotrain.core.spec.training_spec import TrainingSpec


def test_its_lines_have_the_mark_that_is_looked_for_also_with_plugins_left_out(
    tmp_path: Path,
) -> None:
    spec = TrainingSpec.model_validate(
        {
            "model": "m:model",
            "data": "m:data",
            "loss": "mean_squared_error",
            "optimizer": {"name": "sgd", "lr": 0.1},
            "global_batch": 4,
            "epochs": 1,
        }
    )
    plan: Any = SimpleNamespace(run="a run", backend="reference", collective="none")
    plugins = PluginChoice(blocked=("one", "two"))
    command = rank_command(spec, plan, plugins, tmp_path, None)
    assert command.name.startswith("isotrain-a-run-")
    assert command.options[command.options.index("--mark") + 1] == command.name
    assert command.options[-4:] == ("--block-plugin", "one", "--block-plugin", "two")
