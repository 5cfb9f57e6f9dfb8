"""The replica group of one torch process, over any exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isotrain.adapters import own_slots
from isotrain.adapters.remarks import UNALIKE, remarks
from isotrain.adapters.torch import private
from isotrain.adapters.torch.bucketed import BucketedGradients
from isotrain.adapters.torch.build import build_program
from isotrain.adapters.torch.exchange import Exchange, Wait, flat_mean
from isotrain.adapters.torch.hold import Hold
from isotrain.adapters.torch.measures import Measures
from isotrain.adapters.torch.program import OWN_BUFFERS, Program
from isotrain.adapters.torch.replica import TorchReplica
from isotrain.adapters.torch.shares import Shares, over_counted
from isotrain.adapters.torch.state import NamedState, Section, accumulators, generators, unmoved
from isotrain.adapters.torch.tensors import kept, own_part, to_numpy
from isotrain.adapters.weight_files import weights_in
from isotrain.plugin import (
    MODEL_STATE,
    Batch,
    CompressionMethod,
    Computation,
    ExportForm,
    LayerTrait,
    Phase,
    ProcessContext,
    Reduction,
    ReplicaGroup,
    Setting,
    Slice,
    StateInfo,
    StateKind,
    TrainingSpec,
    map_tree,
)


def replica_device(setting: Setting, context: ProcessContext) -> torch.device:
    """The device of this process's replica: its own GPU, or the CPU."""
    if setting.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", context.local_rank)
    torch.cuda.set_device(device)
    return device


class TorchReplicaGroup(ReplicaGroup):
    """One replica: its program, and its exchange with the others.

    Attributes:
        program: The replica.
        exchange: Ties it to the others.
        statistics: Its moving statistics, which are averaged in every step.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        setting: Setting,
        device: torch.device,
        connect: Callable[[], Exchange],
        is_worker: bool = False,
    ) -> None:
        """Builds the model, then joins the others.

        Args:
            spec: What to train.
            setting: What the plan resolved.
            device: Where this replica lives.
            connect: Joins the other replicas; called once the model is built.
            is_worker: Whether it computes what others might as well, in runs that go on without it.
        """
        torch.set_num_threads(setting.threads)
        self._spec = spec
        self._device = device
        self._is_cpu = device.type == "cpu"
        self.program = self._build(spec, device)
        self.exchange = connect()
        self.program.set_split(self.exchange.replicas > 1 or spec.accumulate > 1)
        self.exchange.attach(self.program)
        self.program.distinguish(self.exchange.rank)
        if is_worker:
            self.program.record_at_once()
        self.replicas = self.exchange.replicas
        self.local_replicas = (self.exchange.rank,)
        self._replica = TorchReplica(self.program, self.exchange)
        self._rate: float | None = None
        self._kept: list[torch.Tensor] | None = None
        self._updates_own = False
        self.statistics = self.program.statistics if self.replicas > 1 else []
        self._measures = Measures(self.program, len(spec.losses("torch")), device)
        self._random = generators(device, self.program.generators())
        self._hold = Hold()
        self._state = NamedState(self._sections(), self._hold)

    def _build(self, spec: TrainingSpec, device: torch.device) -> Program:
        """Makes the replica."""
        return build_program(spec, device)

    def _sections(self) -> dict[StateKind, Section]:
        """The state by its kinds."""
        return {
            **self.program.sections(),
            "random": self._random,
            "metrics": accumulators(self._measures.training),
            "exchange": Section(self._habits, self._write_habit),
        }

    def _habits(self) -> dict[str, torch.Tensor]:
        """What exchange and program keep of how they work."""
        return self.exchange.state() | self.program.habits()

    def _write_habit(self, name: str, value: torch.Tensor) -> None:
        to_program = name in self.program.habits() or name.startswith(OWN_BUFFERS)
        write = self.program.write_habit if to_program else self.exchange.write_state
        write(name, value)

    @property
    def model(self) -> Any:
        """The model of this process's replica."""
        return self.program.model

    def place(self, arrays: Any) -> Any:
        is_one = isinstance(arrays, np.ndarray)
        return self._to_device(arrays) if is_one else map_tree(self._to_device, arrays)

    def _to_device(self, array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        if self._is_cpu:
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def own_rates(self) -> Callable[[int], float] | None:
        return self.program.own_rates

    def optimizer_rates(self) -> tuple[float, float] | None:
        return self.program.optimizer_rates()

    def weight_finaliser(self) -> Callable[[], None] | None:
        finalise = self.program.weight_finaliser()
        if finalise is None:
            return None

        def finalised() -> None:
            self._hold.wait()
            finalise()

        return finalised

    def synchronised_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        self._set_learning_rate(learning_rate)
        program, exchange = self.program, self.exchange
        if (arranging := exchange.arranging()) is not None:
            self._arrange(arranging, batch.slices[0][0])
        program.zero_gradients()
        pieces = batch.slices[0]
        shares = Shares(pieces, program, exchange, later=True)
        share: torch.Tensor | None = None
        if len(pieces) > 1:
            with exchange.accumulating():
                for index in range(len(pieces) - 1):
                    share = self._backward(shares, index, exchange.module, share)
        loss, last = self._forward(shares, len(pieces) - 1, exchange.module)
        mean = exchange.begin_loss(_add(share, last))
        program.backward(loss)
        exchange.finish_gradients()
        if shares.later:
            mean = self._over_counted(mean())
        self._update_weights()
        if self.statistics:
            flat_mean(exchange, self.statistics, shares.weight)
        return mean()

    def _over_counted(self, total: torch.Tensor) -> Wait:
        """Makes gradients and loss the means over what counts; a CPU does nothing where all counts."""
        left_out = total[1]
        if self._is_cpu and not left_out:
            return lambda: total[0]
        counted = torch.where(left_out < 1, 1 - left_out, 1.0)
        weights = self.program.trainable.values()
        if gradients := [own_part(w.grad) for w in weights if w.grad is not None]:
            with torch.no_grad():  # parts of gradients are views
                private.foreach_div_(gradients, counted)
        return lambda: over_counted(total)

    def _arrange(self, arranging: AbstractContextManager[Any], piece: Slice) -> None:
        """Lets the exchange see a backward pass, of which nothing else remains."""
        with self.undisturbed(), arranging:
            loss, _ = self.exchange.module(piece.inputs, piece.targets)
            self.program.backward(loss.sum())  # there may be several
            self.exchange.finish_gradients()

    def _forward(
        self, shares: Shares, index: int, module: Callable[..., Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what to take gradients of, and this slice's share of the loss."""
        piece = shares.pieces[index]
        if piece.count:
            loss, predictions = module(piece.inputs, piece.targets)
        else:
            moved = [*self.program.statistics, *self.program.own_buffers().values()]
            with kept(moved), self.program.carry.unmoved():
                loss, predictions = module(piece.inputs, piece.targets)
        self._measures.train(piece, predictions)
        return shares.of(index, loss)

    def _backward(
        self,
        shares: Shares,
        index: int,
        module: Callable[..., Any],
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        """Adds a slice's gradients; returns the share of the loss so far."""
        loss, share = self._forward(shares, index, module)
        self.program.backward(loss)
        return _add(before, share)

    def _set_learning_rate(self, rate: float) -> None:
        if rate != self._rate:
            self.program.set_learning_rate(rate)
            self._rate = rate

    def local_step(self, batch: Batch, learning_rate: float) -> torch.Tensor:
        self._set_learning_rate(learning_rate)
        shares = Shares(batch.slices[0], self.program, self.exchange, local=True)
        mean = self._local_gradients(shares)
        if shares.weight > 0:
            self._update_weights()
        return mean()

    def _local_gradients(
        self,
        shares: Shares,
        each: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Wait:
        """Leaves this replica's gradients in `.grad`; the mean of the losses travels while the last are made.

        Args:
            shares: Of the slices.
            each: Around the passes of each slice.
        """
        self.program.zero_gradients()
        module, last = self.program.objective, len(shares.pieces) - 1
        share: torch.Tensor | None = None
        for index in range(last):
            with each():
                share = self._backward(shares, index, module, share)
        with each():
            loss, own = self._forward(shares, last, module)
            mean = self.exchange.begin_mean(_add(share, own))
            self.program.backward(loss)
        return (lambda: over_counted(mean())) if shares.later else mean

    def gradients(self, batch: Batch) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        shares = Shares(batch.slices[0], self.program, self.exchange)
        mean = self._local_gradients(shares)
        return [self._unscaled_gradients()], mean()

    def _unscaled_gradients(self) -> list[torch.Tensor]:
        """Copies of the gradients in `.grad`, without the loss scale; zeros where there are none."""
        scale = self.program.loss_scale()
        return [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / scale
            for parameter in self.program.trainable.values()
        ]

    def apply(self, gradients: Sequence[Sequence[torch.Tensor]], learning_rate: float) -> None:
        self._set_learning_rate(learning_rate)
        scale = self.program.loss_scale()
        for parameter, gradient in zip(self.program.trainable.values(), gradients[0], strict=True):
            parameter.grad = gradient * scale
        self._update_weights()

    def _update_weights(self) -> None:
        """Clips and applies the gradients in `.grad`, and keeps a copy where that is asked for."""
        if self._kept is not None:
            self._kept = self._unscaled_gradients()
        self._hold.wait_after_forward()
        self.program.apply()

    def keep_slots_of(self, weights: Sequence[Sequence[int]]) -> None:
        self._updates_own = True
        self.program.keep_slots_of(weights[0])
        self._rate = None  # another optimizer

    def reduced_gradients(
        self, batch: Batch, reduction: Reduction
    ) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        bucketed = BucketedGradients(self.program, self._replica, reduction)
        shares = Shares(batch.slices[0], self.program, self.exchange)
        mean = self._local_gradients(
            shares, bucketed.while_they_come if reduction.each_slice else nullcontext
        )
        if not reduction.each_slice:
            bucketed.take_all()
        return [bucketed.kept], mean()

    def update_own(
        self,
        gradients: Sequence[Sequence[torch.Tensor]],
        learning_rate: float,
        norms: Sequence[torch.Tensor] | None,
    ) -> None:
        self._set_learning_rate(learning_rate)
        for parameter, gradient in zip(self.program.updated, gradients[0], strict=True):
            parameter.grad = gradient
        self._hold.wait_after_forward()
        self.program.apply(None if norms is None else norms[0])
        for parameter in self.program.updated:
            parameter.grad = None

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        moved = [*self._frozen_here(), *self._measures.sums()]
        carry, plainly = self.program.carry.unmoved(), self.program.plainly()
        with kept(moved), carry, unmoved(self._random), plainly:  # plainly: no record counts it
            yield

    @contextlib.contextmanager
    def unmoved(self) -> Iterator[None]:
        with kept(self.program.movable), self.program.carry.unmoved(), unmoved(self._random):
            yield

    def _frozen_here(self) -> list[torch.Tensor]:
        """The non-trainable state that this process has as it is now."""
        return list(self.program.frozen.values())

    def keep_gradients(self) -> bool:
        if not self._updates_own:
            self._kept = []
        return not self._updates_own

    def kept_gradients(self) -> list[list[torch.Tensor]]:
        return super().kept_gradients() if self._kept is None else [self._kept]

    def compute(
        self, computation: Computation, *values: Sequence[Any], static: Hashable = None
    ) -> list[Any]:
        options = {} if static is None else {"static": static}
        self._hold.wait()
        with torch.no_grad():
            return [computation(self._replica, *(own for (own,) in values), **options)]

    def compress(self, method: CompressionMethod, rank: int, start: int) -> bool:
        return self.exchange.compress(method, rank, start)

    def evaluation_step(self, batch: Batch) -> None:
        for piece in batch.slices[0]:
            self._measures.evaluate(piece)

    def predict(self, inputs: Sequence[Any]) -> list[Any]:
        return [self.program.predict(own) for own in inputs]

    def collect_metrics(self, phase: Phase) -> dict[str, float]:
        return self._measures.collect(phase, self._total)

    def _total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        return self.exchange.all_reduce(tensor, "sum")

    def take_metrics(self) -> np.ndarray:
        return self._measures.take()

    def add_metrics(self, sums: np.ndarray) -> None:
        self._measures.add(sums)

    def traits(self) -> list[LayerTrait]:
        return self.program.traits() + self.program.without_gradient()

    def remarks(self) -> list[str]:
        return remarks(self._spec, "torch", self.traits()) + self.program.model_remarks()

    def step_remarks(self, batch: Batch) -> list[str]:
        piece = batch.slices[0][0]
        with self.program.carry.unmoved():
            unalike = self.program.counts_unalike(piece.inputs, piece.targets)
            return self.program.remarks(piece.inputs, piece.targets) + [UNALIKE] * unalike

    def refuses_one(self, batch: Batch) -> str | None:
        piece = batch.slices[0][0]
        inputs, targets = map_tree(lambda rows: rows[:1], (piece.inputs, piece.targets))
        with self.undisturbed():
            return self.program.refuses(inputs, targets)

    def draw_anew(self, replica: int, step: int) -> None:
        self.program.draw_anew(replica, step)

    def not_carried(self) -> list[str]:
        return self.program.not_carried()

    def describe_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, StateInfo]:
        self.place_of(replica)
        found = own_slots.as_held(self._state.describe(kinds), self.program.is_alone)
        tied = {n: a for n, a in self.program.aliases.items() if n in found}
        return found | {n: replace(found[n], aliases=names) for n, names in tied.items()}

    def read_state(
        self, kinds: Sequence[StateKind] = MODEL_STATE, *, replica: int | None = None
    ) -> dict[str, np.ndarray]:
        self.place_of(replica)
        return self._state.read(kinds)

    def copy_state(
        self,
        kinds: Sequence[StateKind],
        kept: dict[str, np.ndarray],
        *,
        replica: int | None = None,
    ) -> Callable[[], Mapping[str, np.ndarray]]:
        self.place_of(replica)
        return self._state.copy(kinds, kept)

    def write_state(self, state: Mapping[str, np.ndarray], *, replica: int | None = None) -> None:
        self.place_of(replica)
        self._hold.wait()
        self._state.write({n: v for n, v in state.items() if not self.lives_elsewhere(n)})
        self._rate = None  # the optimizer may have been given another

    def lives_elsewhere(self, name: str) -> bool:
        return own_slots.lives_elsewhere(name, self.program.is_elsewhere)

    def read_weights_file(self, path: Path) -> Mapping[str, np.ndarray]:
        return weights_in(path, self.model)

    def export(self, form: ExportForm, target: Path, inputs: Any | None) -> None:
        self.program.export(form, target, inputs)

    def average_parameters(self) -> None:
        self._hold.wait()
        flat_mean(self.exchange, list(self.program.trainable.values()), 1.0)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(array)).to(self._device)

    def numpy(self, tensor: torch.Tensor) -> np.ndarray:
        return to_numpy(tensor)

    def barrier(self) -> None:
        self.exchange.barrier()

    def synchronise_device(self) -> None:
        self.exchange.require_reduced()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self.program.close()
        self.exchange.close()


def _add(total: torch.Tensor | None, term: torch.Tensor) -> torch.Tensor:
    return term if total is None else total + term
