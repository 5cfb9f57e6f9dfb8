"""Trainer of one part of a tensor-parallel replica of a native model, by torch's `parallelize_module`."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import dropout

from isotrain.adapters.common.model_call import model_call
from isotrain.adapters.keras.tensor_parallel.whole_logits import gathering_metrics, why_whole
from isotrain.adapters.torch.base.tensors import (
    TensorOrShard,
    TensorShard,
    restored_after,
    shard_slices,
)
from isotrain.adapters.torch.metrics.base import Metric, inferred_accuracy
from isotrain.adapters.torch.metrics.registry import build_metrics
from isotrain.adapters.torch.optim.lamb import Lamb
from isotrain.adapters.torch.optim.native import clip_shards
from isotrain.adapters.torch.pipeline.comm import PipelineCommunicator
from isotrain.adapters.torch.tensor_parallel.comparison import Pass, uncut_copy
from isotrain.adapters.torch.tensor_parallel.logits import CutLogits
from isotrain.adapters.torch.tensor_parallel.parts import TorchParts
from isotrain.adapters.torch.tensor_parallel.trainer import TensorParallelTrainer
from isotrain.adapters.torch.trainer.native import NativeTrainer
from isotrain.plugin import Phase, SpecError, TrainingSpec, UnsupportedError

_POSITIONS = Shard(1)
_STYLES: Mapping[str, Callable[[bool], ParallelStyle]] = {
    "colwise": lambda is_embedding: ColwiseParallel(),
    "colwise-gather": lambda is_embedding: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda is_embedding: RowwiseParallel(
        input_layouts=Replicate() if is_embedding else Shard(-1)
    ),
    "colwise-logits": lambda is_embedding: ColwiseParallel(),
    "sequence": lambda is_embedding: SequenceParallel(use_local_output=True),
    "sequence-colwise": lambda is_embedding: ColwiseParallel(input_layouts=_POSITIONS),
    "sequence-colwise-gather": lambda is_embedding: ColwiseParallel(
        input_layouts=_POSITIONS, output_layouts=Replicate()
    ),
    "sequence-colwise-logits": lambda is_embedding: ColwiseParallel(input_layouts=_POSITIONS),
    "rowwise-sequence": lambda is_embedding: RowwiseParallel(
        input_layouts=Replicate() if is_embedding else Shard(-1), output_layouts=_POSITIONS
    ),
}
"""Styles of torch by name; each is made for an Embedding, or for a module of another kind."""
_KNOWN = (
    "colwise, colwise-gather (its outputs are gathered), colwise-logits (the loss takes them cut), rowwise,"
    " or with activations that are cut along their positions: sequence, sequence-colwise,"
    " sequence-colwise-gather, sequence-colwise-logits or rowwise-sequence"
)
_CUT, _NORMS = (nn.Linear, nn.Embedding), (nn.LayerNorm, nn.RMSNorm)
_KINDS: Mapping[str, tuple[type[nn.Module], ...]] = {
    **dict.fromkeys(_STYLES, _CUT),
    "sequence": _NORMS,
    "sequence-colwise": (nn.Linear,),
    "sequence-colwise-gather": (nn.Linear,),
    "colwise-logits": (nn.Linear,),
    "sequence-colwise-logits": (nn.Linear,),
}
"""Kinds of modules that each style is for."""
_SHAPES_COMPARED = (
    "tensor: a plan compares the model with cut modules with the uncut one by the shapes of outputs alone. A"
    " run compares numbers, random draws and gradients when it starts, and may refuse the layers"
)
"""Plan note of a process that stands for all."""


class NativeTensorParallelTrainer(TensorParallelTrainer, NativeTrainer):
    """Trainer of a torch module, of which some Linear and Embedding modules are cut.

    The model computes with DTensors. Optimizer and named state have this process's parts of these.
    """

    _logits: CutLogits | None = None

    def __init__(
        self,
        spec: TrainingSpec,
        model: nn.Module,
        device: torch.device,
        frozen: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._uncut: nn.Module | None = uncut_copy(model)
        self._distributed: list[tuple[DTensor, nn.Parameter]] = []
        super().__init__(spec, model, device, frozen)

    def cut(
        self, communicator: PipelineCommunicator, layers: Sequence[str] | Mapping[str, str]
    ) -> None:
        self._communicator = communicator
        self._styles = modules = self._modules_to_cut(layers)
        self._cut_logits(modules, TorchParts(communicator))
        mesh = communicator.replica_mesh(self._device)
        for name, style in modules.items():
            module = self.model.get_submodule(name)
            _require_equal_parts(name, module, style, mesh.size())
            made = _STYLES[style](isinstance(module, nn.Embedding))
            parallelize_module(self.model, mesh, {name: made})
            if style == "rowwise-sequence":
                module.register_forward_pre_hook(
                    functools.partial(_require_equal_positions, name, mesh.size())
                )
        parameters = dict(self.model.named_parameters())
        trainable, cut_weights = dict(self.trainable), {}
        for index, name in enumerate(self.trainable):
            weight = parameters[name]
            if not isinstance(weight, DTensor):
                continue
            trainable[name] = local = nn.Parameter(weight.detach().to_local())
            self._distributed.append((weight, local))
            (placement,) = weight.placements
            if isinstance(placement, Shard):
                start = mesh.get_local_rank() * local.shape[placement.dim]
                offset = [start * (axis == placement.dim) for axis in range(weight.dim())]
                cut_weights[index] = TensorShard(local, weight.shape, offset)
        self._cut_weights, self.trainable = cut_weights, trainable
        self.cut_notes = [
            _describe(name, self.model.get_submodule(name), style)
            for name, style in modules.items()
        ]
        if names := self._logits and gathering_metrics(self._spec):
            self.cut_notes += [
                f"tensor: metrics ({', '.join(names)}) take whole logits, which the parts gather"
            ]
        if communicator.stands_for_all:
            self.cut_notes += [_SHAPES_COMPARED]
        self._build_optimizer(trainable)
        if isinstance(self.optimizer, Lamb):
            self.optimizer.norms = self._norms_of_weight

    def _modules_to_cut(self, layers: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
        """Names of the modules to cut, each with its style.

        Raises:
            SpecError: The option does not fit the model.
            UnsupportedError: The spec asks for what cannot be compared with the uncut model.
        """
        modules = {
            name: module
            for name, module in self.model.named_modules()
            if type(module) in _CUT + _NORMS
        }
        can_be_cut = f"Modules that can be cut here: {', '.join(modules) or 'none'}."
        if not isinstance(layers, Mapping):
            raise SpecError(
                "strategy tensor: layers: for a native model, expected names of Linear and Embedding modules,"
                f" or patterns of names, each with its style ({_KNOWN}), received {[*layers]}."
                f" {can_be_cut}"
            )
        if self._spec.objective or self._spec.random_layers == "per-sample":
            raise UnsupportedError(
                "strategy tensor: a native model that is cut is compared with the uncut one, which objective"
                " and random_layers: per-sample do not allow. Leave them out, or use a portable model."
            )
        styles: dict[str, str] = {}
        for pattern, style in layers.items():
            named = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
            if style not in _STYLES:
                raise SpecError(
                    f"strategy tensor: layers: {pattern!r}: expected {_KNOWN}, received {style!r}."
                )
            kinds = _KINDS[style]
            matched = [name for name in named if isinstance(modules[name], kinds)]
            if not matched:
                names = " or ".join(kind.__name__ for kind in kinds)
                raise SpecError(
                    f"strategy tensor: layers: {pattern!r}: no {names} has such a name, and {style} is for"
                    f" these. {can_be_cut}"
                )
            styles |= dict.fromkeys(matched, style)
        tied = {name for names in self.aliases.items() for name in (names[0], *names[1])}
        for name in styles:
            weights = {f"{name}.{each}" for each, _ in modules[name].named_parameters()}
            for reason, refused in (("tied", weights & tied), ("frozen", weights & {*self.frozen})):
                if refused:
                    raise SpecError(
                        f"strategy tensor: layers: {min(refused)} is {reason}, and only modules with"
                        f" trainable weights of their own can be cut. Leave {name} out."
                    )
        return styles

    def _cut_logits(self, modules: Mapping[str, str], parts: TorchParts) -> None:
        """Lets loss and metrics take the columns of a module with a style of logits, if there is one.

        Raises:
            SpecError: There are several, the loss takes whole logits, or each process has a single class.
        """
        styled = {name: style for name, style in modules.items() if style.endswith("-logits")}
        if not styled:
            return
        name, style = next(iter(styled.items()))
        if len(styled) > 1:
            raise SpecError(
                f"strategy tensor: layers: expected one module of logits, received {', '.join(styled)}."
            )
        gather = style.replace("logits", "gather")
        if reason := why_whole(self._spec, "torch"):
            raise SpecError(
                f"strategy tensor: layers: {name}: {style}: the loss cannot take cut logits: {reason}. Take"
                f" {gather}."
            )
        classes = self.model.get_submodule(name).out_features
        if classes < 2 * parts.degree:
            raise SpecError(
                f"strategy tensor: layers: {name}: {style}: expected {2 * parts.degree} classes or more for"
                f" this degree, received {classes}. Take {gather}."
            )
        self._logits = CutLogits(self._spec, name, classes // parts.degree, parts)
        assert self._loss is not None
        self._logits.compute(self._loss)

    def _loss_computer(self) -> Callable[[Any, Any], tuple[torch.Tensor, Any]]:
        compute = super()._loss_computer()

        def compute_cut(inputs: Any, targets: Any) -> tuple[torch.Tensor, Any]:
            loss, predictions = compute(inputs, targets)
            return loss, predictions if self._logits is None else self._logits.measured(predictions)

        return compute_cut

    def build_metrics(self, phase: Phase) -> list[Metric]:
        if why_whole(self._spec, "torch"):
            return super().build_metrics(phase)
        return build_metrics(self._spec, self._device, self._loss, self._accuracy)

    def _accuracy(self, targets: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
        """Accuracy per sample or position, of predictions of any form that steps return. Collective."""
        accuracy = inferred_accuracy if self._logits is None else self._logits.accuracy
        return accuracy(targets, predictions)

    def predict(self, inputs: Any) -> Any:
        predictions = super().predict(inputs)
        return predictions if self._logits is None else self._logits.gather(predictions)

    def check_cuts(self, inputs: Any) -> None:
        """Compares the model with the uncut one on a micro-batch, at the first call. Collective.

        A process that stands for all, which computes no sums of parts, compares shapes alone.

        Raises:
            SpecError: It computes something else, draws other random numbers, or has other gradients.
        """
        if self._uncut is None:
            return
        uncut, self._uncut = self._uncut, None
        for name, module in self.model.named_modules():
            uncut.get_submodule(name).training = module.training
        expected = self._run_uncut(uncut, inputs)
        parameters = dict(self.model.named_parameters())
        weights = {name: parameters[name] for name in self.trainable}
        try:
            received = self._run(self.model, weights, {}, inputs)
            if self._cut_dropouts(expected.dropout_shapes, received.dropout_shapes):
                received = self._run(self.model, weights, {}, inputs)
        except RuntimeError as error:
            raise self._misfit(error) from error
        stands_for_all = self._communicator.stands_for_all
        if difference := expected.difference(received, self._autocast_dtype, shapes=stands_for_all):
            raise SpecError(
                f"strategy tensor: layers: the model with cut modules {difference} than the uncut one. The"
                " outputs of a colwise module go, through elementwise operations and torch.nn.Dropout alone,"
                " to a rowwise one; others are gathered by colwise-gather."
            )
        if stands_for_all:
            return
        if wrong := expected.wrong_gradients(
            received, self._autocast_dtype, self.trainable, self._mean_in_replica
        ):
            raise SpecError(
                f"strategy tensor: layers: {', '.join(wrong)}: the gradient in the model with cut modules is"
                " not that in the uncut one. On each process, a weight that is used between a colwise and a"
                " rowwise module (as of a PReLU or a norm per head), or whose outputs are used there, has the"
                " gradient of the units or heads there alone. Gather the outputs of the colwise module"
                " (colwise-gather) and leave the rowwise one out, or leave both out. A norm whose inputs are"
                " cut along their positions takes the style sequence."
            )

    def _run_uncut(self, uncut: nn.Module, inputs: Any) -> Pass:
        """A pass of the uncut model, with gathered weights and copies of the others. Collective."""
        self.gather()
        gathered = dict(self._gathered)
        self.forget_gathered()
        weights = {
            n: gathered[n] if n in gathered else w.detach().clone()
            for n, w in self.trainable.items()
        }
        frozen = {name: each.detach().clone() for name, each in self.frozen.items()}
        return self._run(uncut, weights, frozen, inputs)

    def _run(
        self,
        model: nn.Module,
        weights: Mapping[str, torch.Tensor],
        frozen: Mapping[str, torch.Tensor],
        inputs: Any,
    ) -> Pass:
        """A pass of a model with tensors, by name, in place of its own; restores what it changes."""
        call = self.with_autocast(model_call(self._spec, "torch", model))
        if model is self.model and (logits := self._logits) is not None:
            call = functools.partial(_gathered, logits, call)
        names = list(self.trainable)
        shards = {names[index]: shard for index, shard in self._cut_weights.items()}
        with (
            torch.random.fork_rng(),
            self.step.alone(),
            restored_after([*self.frozen.values()]),
            self.carry.preserving_state(),
        ):
            return Pass(model, call, weights, frozen, shards, inputs)

    def _misfit(self, error: RuntimeError) -> SpecError:
        """The error for parts that do not fit together, as of whole positions beside cut ones."""
        fault = f"strategy tensor: layers: the parts of the modules do not fit together: {error}"
        if not any("sequence" in style for style in self._styles.values()):
            return SpecError(fault)
        whole = [
            name
            for name, module in self.model.named_modules()
            if type(module) is nn.Embedding and name not in self._styles
        ]
        if whole:
            return SpecError(
                f"strategy tensor: layers: {', '.join(whole)}: expected the style rowwise-sequence, received"
                " none: its vectors have all positions, and each process has some of what they are added to."
                f" Give it indices of shape [samples, positions]. ({error})"
            )
        return SpecError(
            f"{fault}. Between rowwise-sequence and sequence-colwise each process has some positions, axis 1."
            " A parameter that the model adds there has all of them: make it an Embedding, with the style"
            " rowwise-sequence."
        )

    def _mean_in_replica(self, value: torch.Tensor) -> torch.Tensor:
        """Mean of a tensor of any shape over the processes of this replica. Collective."""
        return self._communicator.sum_in_replica(value) / self._communicator.topology.processes

    def _cut_dropouts(
        self, whole: Mapping[str, list[torch.Size]], parts: Mapping[str, list[torch.Size]]
    ) -> bool:
        """Lets each Dropout whose inputs are cut draw for the uncut ones; returns whether there are any.

        Args:
            whole: Shapes of the inputs of each Dropout in the uncut model.
            parts: Those in the model with cut modules.
        """
        topology = self._communicator.topology
        found = False
        for name, shapes in parts.items():
            uncut, part = whole[name][0], shapes[0]
            axes = [axis for axis, size in enumerate(part) if uncut[axis] != size]
            if len(uncut) == len(part) and len(axes) == 1:
                module, found = self.model.get_submodule(name), True
                module.forward = functools.partial(
                    _drop_as_whole, module, axes[0], topology.process, topology.processes
                )
        return found

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for weight, local in self._distributed:
            gradient = weight.grad
            if gradient is not None:
                local.grad = gradient.redistribute(placements=weight.placements).to_local()

    def zero_gradients(self) -> None:
        super().zero_gradients()
        for weight, _ in self._distributed:
            weight.grad = None

    def apply(self, norm: torch.Tensor | None = None) -> None:
        """Clips by the scalar norms of the uncut gradients, and updates this process's parts. Collective."""
        self._check_first_update()
        if self._clip is not None:
            clip_shards(self.updated, self._clip, self.norms)
        self._update()

    def _norms_of_weight(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """L2 norms, scalars, of a weight and of tensors that are cut as it is. Collective."""
        index = next(index for index, each in enumerate(self.updated) if each is tensors[0])
        return self._norms_of(tensors, [index] * len(tensors))

    def _read_slots(self) -> dict[str, TensorOrShard]:
        slots = self.optimizer_state().items()
        return {name: self._as_part(slot, self._index_of(name)) for name, slot in slots}

    def write_optimizer_slot(self, name: str, value: torch.Tensor) -> None:
        shard = self._cut_weights.get(self._index_of(name))
        if shard is not None and value.shape == shard.shape:
            value = value[shard_slices(shard)]
        super().write_optimizer_slot(name, value)

    def _index_of(self, slot: str) -> int:
        """Index of the weight that an optimizer state tensor belongs to; -1 for a global one."""
        names = list(self.trainable)
        owner = slot.rpartition("/")[0]
        return names.index(owner) if owner in names else -1


def _gathered(logits: CutLogits, call: Callable[[Any], Any], inputs: Any) -> torch.Tensor:
    """Whole logits of a model whose call returns this process's columns. Collective."""
    return logits.gather(call(inputs))


def _require_equal_parts(name: str, module: nn.Module, style: str, degree: int) -> None:
    """Refuses a module that has no equal parts.

    Raises:
        SpecError: The length of its weight is not a multiple of the degree.
    """
    if style == "sequence":
        return
    weight: torch.Tensor = module.weight
    axis = int(style.startswith("rowwise") != isinstance(module, nn.Embedding))
    if weight.shape[axis] % degree:
        raise SpecError(
            f"strategy tensor: layers: {name}: {style} cuts axis {axis} of its weight, of shape"
            f" {[*weight.shape]}: expected a multiple of degree {degree}. Choose another degree, or leave it"
            " out."
        )


def _require_equal_positions(
    name: str, degree: int, module: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> None:
    """Refuses inputs, shape `[samples, positions, ...]`, whose positions cannot be cut into equal parts.

    Raises:
        SpecError: Inputs lack the axis of samples, or their positions are not a multiple of the degree.
    """
    shape = inputs[0].shape
    if len(shape) < 2:
        raise SpecError(
            f"strategy tensor: layers: {name}: rowwise-sequence cuts axis 1 of its outputs, the positions:"
            f" expected inputs [samples, positions, ...], received inputs of shape {[*shape]}. Give it one"
            " sample, [1, positions], where all samples have the same, as in `torch.arange(n)[None]`."
        )
    if shape[1] % degree:
        raise SpecError(
            f"strategy tensor: layers: {name}: rowwise-sequence cuts axis 1 of its outputs, the positions:"
            f" expected a multiple of degree {degree}, received inputs of shape {[*shape]}."
        )


def _describe(name: str, module: nn.Module, style: str) -> str:
    """A line for the plan: the module, its weight, and what is communicated."""
    if style == "sequence":
        return f"tensor: {name}: sequence: each process has some positions"
    weight: torch.Tensor = module.weight
    outputs, inputs = weight.shape[:2]
    if isinstance(module, nn.Embedding):
        outputs, inputs = inputs, 0
    numbers = {
        "colwise": f"sum {inputs} numbers a position backward",
        "colwise-logits": f"exchange 3 numbers a position forward, for the loss, in place of {outputs}"
        f" logits, and sum {inputs} backward",
        "sequence-colwise-logits": f"gather {inputs} numbers a position forward, exchange 3 for the loss, in"
        f" place of {outputs} logits, and sum {inputs} backward",
        "colwise-gather": f"gather {outputs} numbers a position forward, and sum {inputs} backward",
        "rowwise": f"sum {outputs} numbers a position forward",
        "sequence-colwise": f"gather {inputs} numbers a position forward, and sum {inputs} backward",
        "sequence-colwise-gather": f"gather {inputs} and {outputs} numbers a position forward, and sum"
        f" {inputs} backward",
        "rowwise-sequence": f"sum {outputs} numbers a position forward, and gather {outputs} backward",
    }[style]
    local = (weight.to_local() if isinstance(weight, DTensor) else weight).shape
    cut = f"cut weight {[*weight.shape]} to {[*local]} here"
    return f"tensor: {name}: {style}: {cut}; the parts {numbers}"


def _drop_as_whole(
    module: nn.Dropout, axis: int, index: int, parts: int, inputs: torch.Tensor
) -> torch.Tensor:
    """Draws for the uncut inputs, and drops this process's part, so that it drops as without cuts.

    Args:
        module: The Dropout.
        axis: Axis of the inputs that is cut.
        index: Index of this process's part.
        parts: Number of parts.
        inputs: This process's part of the inputs.
    """
    if not module.training or not module.p:
        return inputs
    length = inputs.shape[axis]
    shape = [*inputs.shape]
    shape[axis] = length * parts
    factors = dropout(inputs.new_ones(shape), module.p)
    return inputs * factors.narrow(axis, index * length, length)
