"""Small programs of plain torch, each right and with a fault that a known project once had.

A program is a function of the rank, the number of processes, and whether it has the fault. `PROGRAMS` says
which fault each has, where it was, and on how many processes the right and the wrong one run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from integration.program_zoo.entry import Entry, Program
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, BATCH, CLASSES = 48, 12, 3

PROGRAMS: dict[str, Entry] = {}


def program(code: str, source: str, right: int = 1, wrong: int = 1) -> Callable[[Program], Program]:
    """Enters a program into the zoo."""

    def enter(train: Program) -> Program:
        PROGRAMS[train.__name__] = Entry(train, code, right, wrong, source)
        return train

    return enter


def samples(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of three clusters: float32 `[48, 8]` and int64 `[48]`."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    centers = torch.randn(CLASSES, 8, generator=draw)
    return centers[labels] + 0.5 * torch.randn(SAMPLES, 8, generator=draw), labels


def network(*, seed: int = 1, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    """An MLP; its initial weights depend on the seed alone."""
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers, nn.Dropout(dropout), nn.Linear(16, CLASSES))


def global_batches(epochs: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Global batches in the order of the data."""
    inputs, labels = samples()
    for _ in range(epochs):
        for start in range(0, SAMPLES, BATCH):
            yield inputs[start : start + BATCH], labels[start : start + BATCH]


def part(tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """A process's rows of a global batch."""
    return tensor.tensor_split(world)[rank]


def sgd(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def wrapped(model: nn.Module, world: int) -> nn.Module:
    return DistributedDataParallel(model) if world > 1 else model


def reduce_mean(model: nn.Module, divisor: int) -> None:
    """All-reduces gradients by hand, and divides them."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(divisor)


@program(
    "mean-of-means",
    "huggingface/transformers#34191: losses of micro-batches with unequal numbers of tokens",
)
def accumulated_tokens(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        masked = labels.clone()
        masked[:5] = -100
        optimizer.zero_grad()
        if wrong:
            for rows in (slice(0, 6), slice(6, 12)):
                (functional.cross_entropy(model(inputs[rows]), masked[rows]) / 2).backward()
        else:
            functional.cross_entropy(model(inputs), masked).backward()
        optimizer.step()


@program("mean-of-means", "modelscope/ms-swift#10165: ranks with unequal numbers of tokens", 1, 2)
def uneven_tokens(rank: int, world: int, wrong: bool) -> None:
    model = wrapped(network(), world)
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        masked = labels.clone()
        masked[:5] = -100
        optimizer.zero_grad()
        rows, targets = part(inputs, rank, world), part(masked, rank, world)
        functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()


@program(
    "divided-twice",
    "NVIDIA-NeMo/Automodel#3830: the loss is divided by the number of ranks again",
    1,
    2,
)
def divided_twice(rank: int, world: int, wrong: bool) -> None:
    model = wrapped(network(), world)
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(part(inputs, rank, world)), part(labels, rank, world))
        (loss / world).backward()
        optimizer.step()


@program(
    "sum-instead-of-mean", "tensorflow/benchmarks#466: an all-reduce whose sum is not divided", 1, 2
)
def summed(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        functional.cross_entropy(
            model(part(inputs, rank, world)), part(labels, rank, world)
        ).backward()
        if world > 1:
            reduce_mean(model, 1)
        optimizer.step()


@program(
    "clipping-before-reduction",
    "tensorflow/tensorflow#25806: each process clips, and then gradients are averaged",
    2,
    2,
)
def clipped_first(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        functional.cross_entropy(
            model(part(inputs, rank, world)), part(labels, rank, world)
        ).backward()
        if wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        reduce_mean(model, world)
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@program("clipping-differs", "a limit that is not passed on")
def not_clipped(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        if not wrong:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@program(
    "schedule-per-process",
    "huggingface/transformers#24088: the schedule moves once for each process",
    2,
    2,
)
def schedule_per_process(rank: int, world: int, wrong: bool) -> None:
    model = wrapped(network(), world)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for inputs, labels in global_batches(2):
        optimizer.zero_grad()
        functional.cross_entropy(
            model(part(inputs, rank, world)), part(labels, rank, world)
        ).backward()
        optimizer.step()
        for _ in range(world if wrong else 1):
            schedule.step()


@program("learning-rate", "a rate that is scaled by the processes, or not")
def other_rate(rank: int, world: int, wrong: bool) -> None:
    train_by(lambda model: sgd(model, lr=0.2 if wrong else 0.1))


@program(
    "same-samples-on-every-rank",
    "Shark-NLP/DiffuSeq#37: a `DataLoader` without `DistributedSampler`",
    2,
    2,
)
def no_distributed_sampler(rank: int, world: int, wrong: bool) -> None:
    data = TensorDataset(*samples())
    sampler = None if wrong else DistributedSampler(data, shuffle=False)
    train_on(DataLoader(data, BATCH // world, sampler=sampler), wrapped(network(), world))


@program("order-repeats", "pytorch/pytorch#31771: `set_epoch` is not called", 2, 2)
def no_set_epoch(rank: int, world: int, wrong: bool) -> None:
    data = TensorDataset(*samples())
    sampler = DistributedSampler(data, seed=3)
    model = wrapped(network(), world)
    optimizer = sgd(model)
    for epoch in range(2):
        if not wrong:
            sampler.set_epoch(epoch)
        steps(DataLoader(data, BATCH // world, sampler=sampler), model, optimizer)


@program("samples-dropped", "`drop_last`, or shares that are cut to one length")
def dropped(rank: int, world: int, wrong: bool) -> None:
    inputs, labels = samples()
    model = network()
    optimizer = sgd(model)
    for start in range(0, 46, BATCH):
        rows = slice(start, min(46, start + BATCH) - (start == 36 and wrong) * 4)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()


@program(
    "samples-repeated", "pytorch/pytorch#22584: `DistributedSampler` fills up uneven shares", 1, 2
)
def padded(rank: int, world: int, wrong: bool) -> None:
    inputs, labels = samples()
    data = TensorDataset(inputs[:45], labels[:45])
    if not wrong:
        train_on(DataLoader(data, BATCH), network())
        return
    sampler = DistributedSampler(data, shuffle=False)
    train_on(DataLoader(data, BATCH // world, sampler=sampler), wrapped(network(), world))


@program("other-order", "another seed of the shuffle")
def other_order(rank: int, world: int, wrong: bool) -> None:
    draw = torch.Generator().manual_seed(5 if wrong else 4)
    data = TensorDataset(*samples())
    train_on(DataLoader(data, BATCH, shuffle=True, generator=draw), network())


@program("other-inputs", "inputs are normalised in one program alone")
def other_inputs(rank: int, world: int, wrong: bool) -> None:
    inputs, labels = samples()
    data = TensorDataset(inputs - inputs.mean(0) if wrong else inputs, labels)
    train_on(DataLoader(data, BATCH), network())


@program(
    "same-random-numbers-on-every-rank",
    "Lightning-AI/pytorch-lightning#6789: seeds that are alike on every replica",
    2,
    2,
)
def same_dropout(rank: int, world: int, wrong: bool) -> None:
    model = wrapped(network(dropout=0.5), world)
    torch.manual_seed(7 if wrong else 7 + rank)
    train_on(part_batches(rank, world), model)


@program("random-layers", "dropout after another number of draws")
def other_dropout(rank: int, world: int, wrong: bool) -> None:
    model = network(dropout=0.5)
    torch.manual_seed(8 if wrong else 7)
    train_on(global_batches(), model)


class Noise(nn.Module):
    """Noise from the global generator of NumPy."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.from_numpy(np.random.normal(size=inputs.shape)).float()


@program("host-random-numbers", "a layer that draws from `numpy.random`, with another seed")
def other_noise(rank: int, world: int, wrong: bool) -> None:
    model = nn.Sequential(Noise(), network())
    np.random.seed(8 if wrong else 7)
    train_on(global_batches(), model)


@program("batch-statistics", "batch normalisation over the samples of one process", 1, 2)
def local_batch_norm(rank: int, world: int, wrong: bool) -> None:
    train_on(part_batches(rank, world), wrapped(network(norm=True), world))


@program(
    "statistics-not-synced",
    "pytorch/pytorch#13711: moving statistics that processes keep for themselves",
    2,
    2,
)
def own_statistics(rank: int, world: int, wrong: bool) -> None:
    model = network(norm=True)
    for layer in model:
        if isinstance(layer, nn.BatchNorm1d):
            layer.momentum = 0.5
    optimizer = sgd(model)
    for inputs, labels in part_batches(rank, world):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        reduce_mean(model, world)
        if not wrong:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        optimizer.step()


@program(
    "average-not-synced", "an average of weights that is taken before processes average them", 2, 2
)
def own_average(rank: int, world: int, wrong: bool) -> None:
    """Steps of each process for itself, and then the mean of their weights."""
    model = network()
    optimizer = sgd(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for inputs, labels in part_batches(rank, world):
        steps([(inputs, labels)], model, optimizer)
        if wrong:
            average.update_parameters(model)
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter)
                parameter.div_(world)
        if not wrong:
            average.update_parameters(model)


@program(
    "not-exchanged",
    "intel/e2eAIOK#198: a layer outside of the `DistributedDataParallel` module",
    2,
    2,
)
def late_layer(rank: int, world: int, wrong: bool) -> None:
    layers = list(network())
    body, head = nn.Sequential(*layers[:-1]), layers[-1]
    ddp = DistributedDataParallel(body)
    head = head if wrong else DistributedDataParallel(head)
    optimizer = torch.optim.SGD([*ddp.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    for inputs, labels in part_batches(rank, world):
        optimizer.zero_grad()
        functional.cross_entropy(head(ddp(inputs)), labels).backward()
        optimizer.step()


@program("weights-not-broadcast", "initial weights that are not broadcast", 2, 2)
def not_broadcast(rank: int, world: int, wrong: bool) -> None:
    model = network(seed=1 + rank * wrong)
    optimizer = sgd(model)
    for inputs, labels in part_batches(rank, world):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        reduce_mean(model, world)
        optimizer.step()


@program(
    "other-samples-after-resume",
    "huggingface/accelerate#2016: a resumed run begins its epoch again",
)
def resumed_samples(rank: int, world: int, wrong: bool) -> None:
    resumed(wrong, with_optimizer=True, with_position=False)


@program("optimizer-state-lost", "NVIDIA-NeMo/Automodel#763: the optimizer's state is not loaded")
def resumed_state(rank: int, world: int, wrong: bool) -> None:
    resumed(wrong, with_optimizer=False, with_position=True)


class Silent(nn.Module):
    """An MLP whose passes no hook sees."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            parameter.detach().clone() for parameter in model.parameters()
        )

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias, head, head_bias = self.weights
        return torch.tanh(inputs @ weight.T + bias) @ head.T + head_bias


@program(
    "communication-state-lost",
    "pytorch/pytorch#75666: the state of PowerSGD is not in the checkpoint",
    2,
    2,
)
def resumed_power_sgd(rank: int, world: int, wrong: bool) -> None:
    """Trains eight steps at once; or is the second half, after a process that no hook has seen."""
    model = network()
    batches = list(part_batches(rank, world)) * 2
    if wrong:
        silent = with_power_sgd(Silent(model))
        optimizer = torch.optim.SGD(silent.parameters(), lr=0.1)
        for inputs, labels in batches[:4]:
            optimizer.zero_grad()
            loss = functional.cross_entropy(silent.forward(inputs), labels)
            torch.autograd.backward.__wrapped__(loss)
            type(optimizer).step.__wrapped__(optimizer)  # without the hooks
        with torch.no_grad():
            for parameter, trained in zip(model.parameters(), silent.parameters(), strict=True):
                parameter.copy_(trained)
    ddp = with_power_sgd(model)
    steps(batches[4:] if wrong else batches, ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))


def with_power_sgd(model: nn.Module) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model)
    state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    ddp.register_comm_hook(state, powerSGD_hook)
    return ddp


def resumed(wrong: bool, *, with_optimizer: bool, with_position: bool) -> None:
    """Trains six steps at once; or is the second half, after a checkpoint."""
    model = network()
    batches = list(global_batches(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if wrong:
        silent = copy.deepcopy(model)
        other = torch.optim.Adam(silent.parameters(), lr=0.01)
        manual_steps(batches[:3], silent, other)
        model.load_state_dict(silent.state_dict())
        if with_optimizer:
            optimizer.load_state_dict(other.state_dict())
    first = 3 if wrong and with_position else 0
    steps(batches[first : first + 3] if wrong else batches[:6], model, optimizer)


def manual_steps(batches: list, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Steps of the process before, which nothing of this one may record."""
    weight, bias, head, head_bias = parameters = list(model.parameters())
    for inputs, labels in batches:
        logits = torch.tanh(inputs @ weight.T + bias) @ head.T + head_bias
        loss = -logits.log_softmax(1)[torch.arange(len(labels)), labels].mean()
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            parameter.grad = gradient
        type(optimizer).step.__wrapped__(optimizer)  # without the hooks


@program(
    "clipped-while-scaled", "Lightning-AI/pytorch-lightning#9606: clipping before `scaler.unscale_`"
)
def clipped_while_scaled(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(inputs), labels)).backward()
        if not wrong:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()


@program("loss-scale", "the optimizer's own step in place of the scaler's")
def not_unscaled(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(inputs), labels)).backward()
        if wrong:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@program("optimizer-options", "ServiceNow/Fast-LLM#542: weight decay on biases")
def decayed_biases(rank: int, world: int, wrong: bool) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for n, p in named if "bias" not in n]},
            {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.1 * wrong},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

    train_by(optimizer)


@program("optimizer-options", "the epsilon of Adam: 1e-7 in Keras, 1e-8 in torch")
def other_epsilon(rank: int, world: int, wrong: bool) -> None:
    train_by(lambda model: torch.optim.Adam(model.parameters(), eps=1e-7 if wrong else 1e-8))


@program(
    "ignored-targets-counted",
    "EleutherAI/gpt-neo#45: padding that counts, where `ignore_index` is lost",
)
def padding_counted(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        masked = labels.clone()
        masked[:4] = 0 if wrong else -100
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), masked).backward()
        optimizer.step()


@program(
    "accumulation-not-divided",
    "agokrani/distillKitPlus#5: micro-batches whose losses are not divided by their number",
)
def not_divided(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        for rows in (slice(0, 6), slice(6, 12)) if wrong else (slice(0, 12),):
            functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
        optimizer.step()


@program("gradients-not-zeroed", "`zero_grad` is not called")
def not_zeroed(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        if not wrong:
            optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


@program(
    "evaluation-mode", "wkentaro/pytorch-fcn#56: `model.train()` is not called after an evaluation"
)
def left_in_evaluation(rank: int, world: int, wrong: bool) -> None:
    model = network(norm=True)
    optimizer = sgd(model)
    for number, (inputs, labels) in enumerate(global_batches(2)):
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if number == 3:
            model.eval()
            with torch.no_grad():
                model(samples()[0])
            if not wrong:
                model.train()


@program(
    "not-in-optimizer",
    "huggingface/transformers#3532: an optimizer that is made before the model is complete",
)
def forgotten_layer(rank: int, world: int, wrong: bool) -> None:
    model = network()
    named = dict(model.named_parameters())
    chosen = [p for name, p in named.items() if not (wrong and name.startswith("3"))]
    optimizer = torch.optim.SGD(chosen, lr=0.1)
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@program(
    "weights-untied",
    "meta-pytorch/torchtune#616: weights that are tied before they are sharded are two after it",
)
def untied(rank: int, world: int, wrong: bool) -> None:
    """A projection and back by one matrix; or by two, of which one was copied."""
    torch.manual_seed(1)
    first, second = (nn.Linear(8, 8, bias=False) for _ in range(2))
    second.weight = nn.Parameter(first.weight.detach().clone()) if wrong else first.weight
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(8, CLASSES))
    train_on(global_batches(), model)


@program(
    "evaluation-repeats-samples",
    "pytorch/pytorch#25162: evaluation counts the samples that fill up shares",
    1,
    2,
)
def padded_evaluation(rank: int, world: int, wrong: bool) -> None:
    model = wrapped(network(), world)
    optimizer = sgd(model)
    steps(part_batches(rank, world), model, optimizer)
    inputs, labels = samples()
    data = TensorDataset(inputs[:45], labels[:45])
    sampler = DistributedSampler(data, shuffle=False) if world > 1 else None
    model.eval()
    with torch.no_grad():
        for rows, _ in DataLoader(data, BATCH // world, sampler=sampler):
            model(rows)


@program("precision", "one program under autocast")
def autocast(rank: int, world: int, wrong: bool) -> None:
    model = network()
    optimizer = sgd(model)
    for inputs, labels in global_batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=wrong):
            logits = model(inputs)
            loss = functional.cross_entropy(logits.float() * 8, labels)
        loss.backward()
        optimizer.step()


def part_batches(rank: int, world: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for inputs, labels in global_batches():
        yield part(inputs, rank, world), part(labels, rank, world)


def train_by(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = network()
    steps(global_batches(), model, optimizer(model))


def train_on(batches: Iterator | DataLoader, model: nn.Module) -> None:
    steps(batches, model, sgd(model))


def steps(batches: object, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Steps of the usual kind."""
    for inputs, labels in batches:  # type: ignore[attr-defined]
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def clean(name: str, seed: int, rank: int, world: int) -> None:
    """A program without a fault; it trains alike on any number of processes and threads."""
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, 1, 8, 8, generator=draw)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=draw)
    model: nn.Module = {"mlp": _mlp, "cnn": _cnn, "attention": _attention}[name]()
    model = wrapped(model, world)
    optimizer: torch.optim.Optimizer = sgd(model, lr=0.05)
    if name == "attention":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for start in range(0, SAMPLES, BATCH):
        rows = slice(start, start + BATCH)
        optimizer.zero_grad()
        loss = functional.cross_entropy(
            model(part(inputs[rows], rank, world)), part(labels[rows], rank, world)
        )
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def _cnn() -> nn.Module:
    convolutions = [nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3)]
    return nn.Sequential(*convolutions, nn.ReLU(), nn.Flatten(), nn.Linear(256, CLASSES))


def _attention() -> nn.Module:
    block = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), block, nn.Flatten(), nn.Linear(64, CLASSES))


CLEAN = ("mlp", "cnn", "attention")
