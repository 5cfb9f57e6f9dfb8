"""Exports torch modules as a `state_dict` or to ONNX."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isotrain.adapters.torch.base.pytree import filled, leaves
from isotrain.plugin import ExportForm, SpecError, UnsupportedError

ONNX_HINT = "install what torch exports ONNX with: pip install 'isotrain[onnx]'"


def write(
    module: nn.Module,
    form: ExportForm,
    target: Path,
    inputs: Any | None,
    call: Callable[[Any], Any] | None = None,
) -> None:
    """Writes a module that is in evaluation mode.

    Args:
        module: Module to write.
        form: `torch` (a `state_dict`) or `onnx`.
        target: File to write.
        inputs: Inputs of a few samples, `[samples, ...]` or a tree of such; None if unknown.
        call: Function from inputs to predictions, for ONNX; None for the module itself.

    Raises:
        UnsupportedError: A torch module has no such form, or torch cannot export it.
        SpecError: ONNX needs inputs, and there are none.
    """
    if form == "torch":
        state = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
        torch.save(state, target)
    elif form == "onnx":
        require_onnx()
        _write_onnx(module if call is None else _Called(module, call), target, inputs)
    else:
        raise UnsupportedError(
            f"export: a torch module has no form {form!r}; it has torch, safetensors and onnx."
        )


class _Called(nn.Module):
    """A module whose forward pass calls another one as the spec's `call` says."""

    def __init__(self, module: nn.Module, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, inputs: Any) -> Any:
        return self._call(inputs)


def require_onnx() -> None:
    """Checks that the packages are installed with which torch exports ONNX.

    Raises:
        UnsupportedError: One is missing.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(f"export: {' and '.join(missing)} are not installed: {ONNX_HINT}.")


def _write_onnx(module: nn.Module, target: Path, inputs: Any | None) -> None:
    """Exports to ONNX with a dynamic batch dimension."""
    if inputs is None:
        raise SpecError(
            "export: for ONNX of a torch module, samples of its inputs are needed. Give data=... (--data on"
            " the command line)."
        )
    batch = torch.export.Dim("batch")
    shapes = filled(inputs, ({0: batch} for _ in leaves(inputs)))
    try:
        torch.onnx.export(
            module,
            (inputs, {}),  # torch takes a dict in the last place for keyword arguments
            str(target),
            dynamo=True,
            dynamic_shapes=(shapes,),
            external_data=False,
            verbose=False,
        )
    except Exception as error:  # the exporter raises many classes for what it does not support
        raise UnsupportedError(
            f"export: torch cannot export this module to ONNX: {type(error).__name__}: {error}"
        ) from error
