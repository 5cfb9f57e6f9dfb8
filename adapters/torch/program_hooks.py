"""Hooks in torch that record a program which is not isotrain's: passes, steps, clipping, collectives.

Nothing that the program computes is changed. Gradients are those that the optimizer gets.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from isotrain.adapters.common.program_hooks import (
    call_after,
    call_before,
    draws_since,
    host_random_states,
    safe,
)

if TYPE_CHECKING:
    from isotrain.plugin import ProgramRecorder

_COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def install(recorder: ProgramRecorder) -> None:
    """Hooks modules, optimizers, clipping, losses and collectives of this process."""
    hooks = _Hooks(recorder)
    module = torch.nn.modules.module
    module.register_module_forward_pre_hook(safe(hooks.enter))
    module.register_module_forward_hook(safe(hooks.leave), with_kwargs=True, always_call=True)
    optimizer = importlib.import_module("torch.optim.optimizer")
    optimizer.register_optimizer_step_pre_hook(safe(hooks.before_step))
    optimizer.register_optimizer_step_post_hook(safe(hooks.after_step))
    call_before(torch.autograd, "backward", hooks.backward)
    call_after(torch.autograd, "backward", hooks.after_backward)
    call_before(nn.functional, "cross_entropy", hooks.cross_entropy)
    call_before(torch.amp.GradScaler, "unscale_", lambda *args, **kwargs: hooks.note("unscale"))
    average = torch.optim.swa_utils.AveragedModel
    call_after(average, "update_parameters", hooks.averaged)
    for owner in (nn.utils, nn.utils.clip_grad):
        call_after(owner, "clip_grad_norm_", hooks.clipped)
    if torch.distributed.is_available():
        call_before(nn.parallel.DistributedDataParallel, "register_comm_hook", hooks.comm_hook)
        for name in _COLLECTIVES:
            call_before(torch.distributed, name, functools.partial(hooks.collective, name))


class _Hooks:
    """The functions that torch calls, with the models and optimizers that they have seen so far."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self._depth = 0
        self._is_in_backward = False  # where activation checkpointing calls modules again
        self._models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        self._facts: dict[str, Any] = {}
        self._averages: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._compresses, self._comm_hook = False, ""
        self._host_random: dict[str, int] = {}

    def comm_hook(self, model: nn.Module, state: Any, hook: Any) -> None:
        """Keeps by which function DistributedDataParallel exchanges gradients, and whether in 16 bits."""
        while isinstance(hook, functools.partial):
            hook = hook.func
        self._comm_hook = getattr(hook, "__qualname__", type(hook).__qualname__)
        self._compresses |= "16_compress" in self._comm_hook

    def averaged(self, result: Any, average: nn.Module, model: nn.Module) -> None:
        """Keeps an average of weights, such as an exponential moving one."""
        self._averages[average] = None

    def note(self, kind: str, **facts: Any) -> None:
        """Records an event."""
        if self._recorder.is_recording:
            self._recorder.event(kind, **facts)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Counts how deep the calls of modules are."""
        self._depth += 1
        if self._depth == 1 and self._recorder.is_recording:
            self._host_random = host_random_states()

    def leave(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Records a forward pass of an outermost module: its samples and its mode."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self._is_in_backward or not self._recorder.is_recording:
            return
        if len(rest) < 2:  # the pass has raised
            return
        kwargs, _ = rest
        parameters = {id(parameter) for parameter in module.parameters()}
        if not parameters:  # a loss, for example
            return
        if module not in self._models and parameters.isdisjoint(self._model_parameters()):
            self._models[module] = None  # else it is a part of a model, or a wrapper of one
        arrays = [_array(tensor) for tensor in _tensors((args, kwargs)) if tensor.dim()]
        layers = list(module.modules())
        self._recorder.event(
            "forward",
            rows=self._recorder.rows(arrays) if arrays else [],
            training=module.training,
            gradients=torch.is_grad_enabled(),
            dropout=any(isinstance(layer, _DROPOUT) and layer.p > 0 for layer in layers),
            batch_norm=any(isinstance(layer, _BATCH_NORM) for layer in layers),
            autocast=torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"),
            wrapper=type(module).__name__,
            random={"torch": zlib.crc32(torch.get_rng_state().numpy())},
            host_random=draws_since(self._host_random),
        )

    def backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """Records the loss that is differentiated."""
        self._is_in_backward = True
        loss = next(_tensors(tensors), None)
        if self._recorder.is_recording and loss is not None and loss.numel() == 1:
            self.note("backward", loss=float(loss.detach()))

    def after_backward(self, *args: Any, **kwargs: Any) -> None:
        """Ends a backward pass."""
        self._is_in_backward = False

    def cross_entropy(
        self,
        input: torch.Tensor,
        target: torch.Tensor,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        """Records over how many targets a cross-entropy is taken."""
        if not self._recorder.is_recording:
            return
        is_class = not target.is_floating_point()
        count = (
            int((target != ignore_index).sum())
            if is_class
            else target.numel() // target.shape[min(1, target.dim() - 1)]
        )
        self.note(
            "loss",
            targets=count,
            ignored=target.numel() - count if is_class else 0,
            reduction=reduction,
        )

    def clipped(
        self, norm: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any
    ) -> None:
        """Records the norm before clipping, and its limit."""
        if self._recorder.is_recording:
            self.note("clip", norm=float(norm), limit=float(max_norm))

    def collective(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Records a call of `torch.distributed`: its operation, and its first tensor's size and norm."""
        tensor = next(_tensors((args, kwargs)), None)
        if tensor is not None and self._recorder.is_recording:
            op = kwargs.get("op", args[1] if len(args) > 1 else "")
            norm = float(tensor.detach().double().norm()) if tensor.is_floating_point() else None
            self._recorder.event(
                "collective", name=name, op=str(op), size=tensor.numel(), norm=norm
            )

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Reads gradients, options and, before the first step, weights."""
        is_first = optimizer not in self._optimizers
        index = self._optimizers.setdefault(optimizer, len(self._optimizers))
        if not self._recorder.wants(index):
            return
        named = self._named_parameters(optimizer)
        gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
        self._facts |= {  # of the innermost step: that of a wrapper sees gradients before the exchange
            "gradient": self._prints(gradients),
            "groups": _groups(optimizer, self._all_named_parameters(optimizer)),
            "compressed": self._compresses or _compresses(optimizer),
            "comm_hook": self._comm_hook,
        }
        if is_first:
            self._recorder.set_rank(*_rank())
            self._facts |= self._recorder.start(_arrays(named), _arrays(self._buffers()))
            names = self._all_named_parameters(optimizer)
            self._facts["untrained"] = sorted(set(self._model_parameters().values()) - set(names))
            self._facts["sharded"] = sorted(set(names) - set(named))

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Reads weights and state, and ends the record of the step."""
        if not self._facts:
            return
        named = self._named_parameters(optimizer)
        state = {
            f"{name}/{key}": value
            for name, parameter in named.items()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        self._recorder.step(
            self._optimizers[optimizer],
            {
                **self._facts,
                "weight": self._prints(named),
                "optimizer_state": self._prints(state),
                "state": self._prints(self._buffers()),
            },
        )
        self._facts = {}

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of all models that were called, by name, and averages of weights as `averaged.NAME`."""
        averages = {
            f"averaged.{_plain(name)}": parameter
            for average in self._averages
            for name, parameter in average.named_parameters()
        }
        return averages | self._named_in_models(nn.Module.named_buffers)

    def _model_parameters(self) -> dict[int, str]:
        """Names of the parameters of all models that were called, by identity; each name once."""
        named = self._named_in_models(nn.Module.named_parameters)
        return {id(parameter): name for name, parameter in named.items()}

    def _named_in_models(
        self, named: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]
    ) -> dict[str, torch.Tensor]:
        """Tensors of all models that were called; the model is named where an earlier one has the name."""
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for number, model in enumerate(self._models):
            taken = set(tensors)
            for name, tensor in named(model):
                plain = _plain(name)
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    qualified = f"{type(model).__name__}{number}.{plain}"
                    tensors[qualified if plain in taken else plain] = tensor
        return tensors

    def _named_parameters(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The optimizer's parameters that are not sharded over processes, by name."""
        named = self._all_named_parameters(optimizer)
        return {name: parameter for name, parameter in named.items() if not _is_sharded(parameter)}

    def _all_named_parameters(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The optimizer's parameters by their names in the models, or by their place in the optimizer."""
        names = self._model_parameters()
        return {
            names.get(id(parameter), f"group{g}.{i}"): parameter
            for g, group in enumerate(optimizer.param_groups)
            for i, parameter in enumerate(group["params"])
        }

    def _prints(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
        """Fingerprints of tensors, of which those sharded over processes are left out."""
        return self._recorder.fingerprints(_arrays(tensors))


def _compresses(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer of Horovod exchanges gradients in 16 bits."""
    compression = getattr(optimizer, "_compression", None)
    return getattr(compression, "__name__", "") == "FP16Compressor"


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any shape is a DTensor, as of FSDP2, or a parameter that FSDP1 flattens."""
    return hasattr(tensor, "device_mesh") or hasattr(tensor, "_fsdp_flattened")


def _rank() -> tuple[int, int]:
    """This process's rank and the number of processes, as the program's library of collectives has them."""
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _groups(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """The options of each parameter group, and the names of its parameters."""
    names = {id(parameter): name for name, parameter in named.items()}
    return [
        {
            "optimizer": type(optimizer).__name__,
            "dtype": str(next((p.dtype for p in group["params"]), "")).removeprefix("torch."),
            "names": [names[id(parameter)] for parameter in group["params"]],
            "options": {
                key: _option(value)
                for key, value in group.items()
                if key not in ("params", "initial_lr", "param_names")
            },
        }
        for group in optimizer.param_groups
    ]


def _option(value: Any) -> Any:
    """An option as JSON has it: numbers of tensors, and the text of what is neither number nor text."""
    if isinstance(value, torch.Tensor | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_option(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _plain(name: str) -> str:
    """A parameter's name without those of wrappers such as DDP."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Arrays of tensors, of which those sharded over processes are left out."""
    return {name: _array(tensor) for name, tensor in tensors.items() if not _is_sharded(tensor)}


def _array(tensor: torch.Tensor) -> np.ndarray:
    """A NumPy view or copy, of the tensor's shape; 16-bit floats as float32."""
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return (
        tensor.to_dense().cpu().numpy() if tensor.layout != torch.strided else tensor.cpu().numpy()
    )
