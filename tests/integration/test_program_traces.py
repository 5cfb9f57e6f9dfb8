"""Traces of programs of plain torch: where they part, and which fault of the zoo it is."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.program_zoo.keras_programs import KERAS_PROGRAMS
from integration.program_zoo.programs import CLEAN, PROGRAMS

from isotrain.analysis.parity import tensor_sketch
from isotrain.analysis.program_trace.comparison import compare
from isotrain.analysis.program_trace.reading import ProgramTrace, read_trace
from isotrain.core.errors import IsotrainError

SEEDS = int(os.environ.get("ISOTRAIN_TRACE_SEEDS", "4"))
pytestmark = [pytest.mark.examples, pytest.mark.timeout(300 + 15 * SEEDS)]  # all are recorded first
TESTS = Path(__file__).parents[1]
TRAIN = """
import gc
import os
import torch
from torch.nn.parallel import DistributedDataParallel

world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
inputs, labels = torch.randn(48, 8), torch.randint(3, (48,))
if world > 1:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for start in range(0, 48, 12):
    rows = inputs[start : start + 12].tensor_split(world)[rank]
    targets = labels[start : start + 12].tensor_split(world)[rank]
    optimizer.zero_grad()
    (torch.nn.functional.cross_entropy(model(rows), targets) / FACTOR).backward()
    optimizer.step()
if world > 1:
    del model, optimizer  # torch may abort at the exit, traced or not, where they hold its process group
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ProgramTrace]:
    """Traces by name; the programs run once."""
    folder = tmp_path_factory.mktemp("zoo")
    command = [sys.executable, "-m", "integration.program_zoo.recording", str(folder), str(SEEDS)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(TESTS)}, check=True)
    return functools.cache(lambda name: read_trace(folder / name))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_fault_of_each_program_is_named(
    trace: Callable[[str], ProgramTrace], name: str
) -> None:
    found = compare(trace(f"{name}-right"), trace(f"{name}-wrong"))
    assert not found.agree
    assert found.causes[0].code == PROGRAMS[name].code, [cause.evidence for cause in found.causes]


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", CLEAN)
def test_programs_that_differ_by_rounding_agree(
    trace: Callable[[str], ProgramTrace], name: str, seed: int
) -> None:
    runs = [trace(f"{name}-{seed}{variant}") for variant in ("", "-threads", "-processes")]
    for one, other in itertools.permutations(runs, 2):
        found = compare(one, other)
        assert found.agree, found.differences[0]
        assert found.steps == 4


def by_hand(folder: Path, program: str) -> ProgramTrace:
    """The trace of a program, given as text."""
    script = folder.with_suffix(".py")
    script.write_text(program)
    command = (sys.executable, script.name)
    made = isotrain("trace", "--output", folder, "--", *command, folder=folder.parent)
    assert made.returncode == 0, made.stderr
    assert "not recorded" not in made.stderr
    return read_trace(folder)


ODD = """
import importlib.util

assert importlib.util.find_spec("torch")  # as libraries do that can go without it
import torch
from torch.utils.checkpoint import checkpoint

class Recomputed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)

torch.manual_seed(0)
encoder, decoder, head = Recomputed(), Recomputed(), torch.nn.Linear(8, 3)
weights = [*encoder.parameters(), *decoder.parameters(), *head.parameters()]
optimizer = torch.optim.SGD([{"params": weights}, {"params": []}], lr=0.1, foreach=False)
for _ in range(4):
    optimizer.zero_grad()
    logits = head(decoder(encoder(torch.randn(6, 8))))
    torch.nn.functional.cross_entropy(logits, torch.rand(6, 3)).backward()
    optimizer.step()
"""


def test_models_that_share_names_and_recompute_are_traced(tmp_path: Path) -> None:
    """And a search for torch before its import, an empty group, and probabilities as targets."""
    one = by_hand(tmp_path / "one", ODD)
    assert len(one.steps) == 4
    assert len(one.steps[0].first.weight) == 14
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    models = ("norm", "Recomputed1.norm")
    assert one.steps[0].first.state.keys() == {f"{m}.{s}" for m in models for s in statistics}
    assert len(one.steps[0].first.passes()) == 3
    two = by_hand(tmp_path / "two", ODD.replace("foreach=False", "foreach=True"))
    assert compare(one, two).agree
    three = by_hand(tmp_path / "three", ODD.replace("0.1", "0.2"))
    assert compare(one, three).causes[0].code == "learning-rate"


WITHOUT_RATE = """
import torch

class Descent(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"sizes": (torch.tensor(SIZE), 1.0), "rule": torch.sub})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(group["rule"](parameter, group["sizes"][0] * parameter.grad))

torch.manual_seed(0)
model = torch.nn.Linear(8, 3)
optimizer = Descent(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
"""
"""An optimizer of one's own, without a rate, of whose options some are neither numbers nor text."""


def test_an_optimizer_without_a_learning_rate_is_traced(tmp_path: Path) -> None:
    one = by_hand(tmp_path / "one", WITHOUT_RATE.replace("SIZE", "0.1"))
    assert compare(one, one).agree
    other = by_hand(tmp_path / "other", WITHOUT_RATE.replace("SIZE", "0.3"))
    found = compare(one, other)
    assert [each.name for each in found.differences] == ["weight/sizes", "bias/sizes"]
    assert found.causes[0].code == "optimizer-options"


def test_traces_that_cannot_be_compared_are_refused(
    trace: Callable[[str], ProgramTrace], tmp_path: Path
) -> None:
    whole = trace("mlp-0-processes")
    rank = next(whole.folder.glob("rank-1-*"))
    copied = tmp_path / "copied"
    shutil.copytree(whole.folder, copied)
    (copied / rank.name).unlink()
    with pytest.raises(IsotrainError, match="1 of 2 processes have a file"):
        read_trace(copied)
    shutil.copy(rank, copied / rank.name)
    shutil.copy(rank, copied / f"{rank.stem}0.jsonl")
    with pytest.raises(IsotrainError, match="two processes of rank 1"):
        read_trace(copied)
    (copied / f"{rank.stem}0.jsonl").unlink()
    with (copied / rank.name).open("a") as file:
        file.write('{"kind": "st')  # its process was killed
    assert len(read_trace(copied).steps) == 4
    assert compare(whole, by_hand(tmp_path / "odd", ODD)).differences[0].stage == "batch"


def isotrain(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "isotrain", *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_programs_are_traced_as_they_are(tmp_path: Path) -> None:
    """A script by itself, and under torchrun; the second divides its loss once more."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    (tmp_path / "train.py").write_text(TRAIN.replace("FACTOR", "1"))
    (tmp_path / "wrong.py").write_text(TRAIN.replace("FACTOR", "world"))
    one = isotrain(*("trace", "--output", "one", "--", sys.executable, "train.py"), folder=tmp_path)
    assert (one.returncode, one.stdout) == (0, ""), one.stderr
    assert "4 steps of 1 process in" in one.stderr
    two = isotrain("trace", "--output", "two", "--", *torchrun, "wrong.py", folder=tmp_path)
    assert two.returncode == 0, two.stderr
    found = isotrain("parity", "one", "two", folder=tmp_path)
    assert found.returncode == 6, found.stderr
    assert "Likely cause: gradients are divided by the number of processes twice" in found.stdout
    found = isotrain("parity", "one", "one", "--json", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["differences"] == []
    again = isotrain("trace", "--output", "one", "--", "python", "train.py", folder=tmp_path)
    assert (again.returncode, "there is a trace in it" in again.stderr) == (2, True)


def test_each_rank_may_start_its_process_through_trace(tmp_path: Path) -> None:
    """As under srun; here torchrun starts `isotrain trace` once for each rank."""
    (tmp_path / "train.py").write_text(TRAIN.replace("FACTOR", "1"))
    program = ("--", sys.executable, "train.py")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    traced = [sys.executable, *torchrun, "-m", "isotrain", "trace"]
    one = isotrain("trace", "--output", "one", *program, folder=tmp_path)
    assert one.returncode == 0, one.stderr
    for words, status, said in (
        (["--output", "two"], 0, ""),
        (["--output", "two"], 1, "two: there is a trace in it"),
        ([], 1, "trace: expected --output FOLDER, as each of 2 ranks records its process"),
    ):
        made = subprocess.run(
            [*traced, *words, *program], cwd=tmp_path, capture_output=True, text=True
        )
        assert (made.returncode, said in made.stderr) == (status, True), made.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["one", "train.py", "two"]
    two = read_trace(tmp_path / "two")
    assert two.processes == 2
    found = compare(read_trace(tmp_path / "one"), two)
    assert (found.agree, found.steps) == (True, 4)


@pytest.mark.exhaustive
def test_exchanges_in_16_bits_raise_no_alarm(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    script = TRAIN.replace("FACTOR", "1")
    wrapping = "    model = DistributedDataParallel(model)\n"
    hooking = "    model.register_comm_hook(None, default_hooks.fp16_compress_hook)\n"
    script = (
        "import functools\nfrom torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        + script
    )
    compressed = script.replace(wrapping, wrapping + hooking)
    hook = "default_hooks.fp16_compress_hook"
    making = f"    hook = functools.partial({hook})\n    hook.__name__ = hook.__qualname__ = 'exchange'\n"
    partial = script.replace(wrapping, f"{wrapping}{making}{hooking.replace(hook, 'hook')}")
    for name, text in (("whole", script), ("compressed", compressed), ("partial", partial)):
        (tmp_path / "train.py").write_text(text)
        command = ("trace", "--output", name, "--", *torchrun, "train.py")
        made = isotrain(*command, folder=tmp_path)
        assert made.returncode == 0, made.stderr
    traces = [read_trace(tmp_path / name) for name in ("whole", "compressed", "partial")]
    whole, *halves = [trace.steps[0].first.gradient["0.weight"] for trace in traces]
    for half in halves:
        assert tensor_sketch.difference(whole, half) > 1e-4, "more than rounding of float32"
    for one, other in itertools.permutations(traces, 2):
        assert compare(one, other).agree


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sharding", "sharded", "status", "named"),
    [
        ("fully_shard(model[0])", 2, 6, "sharded over processes, not compared: 0.bias, 0.weight"),
        ("model = FSDP(model, use_orig_params=True, device_id=device)", 4, 2, "are sharded over"),
    ],
    ids=["FSDP2", "FSDP1"],
)
def test_sharded_weights_are_named_and_not_compared(
    sharding: str, sharded: int, status: int, named: str, tmp_path: Path
) -> None:
    """One layer is sharded, and the other one is not exchanged; or all are."""
    script = TRAIN.replace("model = DistributedDataParallel(model)", sharding)
    (tmp_path / "train.py").write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard\n"
        + script.replace("FACTOR", "1").replace("device_id=device", "device_id=torch.device('cpu')")
    )
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    for name, start in (("one", (sys.executable,)), ("two", torchrun)):
        made = isotrain("trace", "--output", name, "--", *start, "train.py", folder=tmp_path)
        assert made.returncode == 0, made.stderr
        assert made.stderr.count("not recorded, as sharded") == (name == "two")
    assert len(read_trace(tmp_path / "two").sharded) == sharded
    found = isotrain("parity", "one", "two", folder=tmp_path)
    assert (found.returncode, named in found.stdout + found.stderr) == (status, True)


def test_programs_of_horovod_are_traced(tmp_path: Path) -> None:
    """Summed gradients are found, also beside an exchange in 16 bits, which is no fault."""
    script = f"""
import horovod.torch as hvd
import torch

hvd.init()
{TRAIN[TRAIN.index("torch.manual_seed") : TRAIN.index("if world")]}
optimizer = torch.optim.AdamW(model.parameters())
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=OPERATION)
{TRAIN[TRAIN.index("for start") : TRAIN.rindex("if world")]}"""
    script = script.replace("rank]", "hvd.rank()]").replace("(world)", "(hvd.size())")
    operations = {
        "mean": "hvd.Average",
        "sum": "hvd.Sum",
        "half": "hvd.Average, compression=hvd.Compression.fp16",
    }
    for name, operation in operations.items():
        text = script.replace("OPERATION", operation).replace("FACTOR", "1")
        (tmp_path / "train.py").write_text(text)
        start = (Path(sys.executable).with_name("horovodrun"), "-np", "2", sys.executable)
        made = isotrain("trace", "--output", name, "--", *start, "train.py", folder=tmp_path)
        assert made.returncode == 0, made.stderr
    mean, total, half = (read_trace(tmp_path / name) for name in operations)
    for reference, factor in ((mean, "2 times"), (half, "1.99")):  # rounding of 16 bits
        found = compare(reference, total)
        assert found.causes[0].code == "gradients-scaled"
        assert f"gradients are {factor}" in found.causes[0].evidence[0]
    first, other = (trace.steps[0].first.gradient["0.weight"] for trace in (mean, half))
    assert tensor_sketch.difference(first, other) > 1e-4, "more than rounding of float32"
    for one, two in itertools.permutations((mean, half)):
        assert compare(one, two).agree


def test_the_page_lists_every_program() -> None:
    page = (TESTS.parent / "docs" / "trace.md").read_text(encoding="utf-8")
    table = page.partition("<!-- zoo -->")[2].partition("<!-- /zoo -->")[0]
    links = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", table)
    entries = [*PROGRAMS.values(), *KERAS_PROGRAMS.values()]
    rows = [f"| `{entry.code}` | {entry.source} |" for entry in entries]
    assert links.split("\n")[3:-1] == rows


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("trace",), 2, "expected a program after --"),
        (("trace", "--", "no-such-program"), 2, "no-such-program: No such file"),
        (("trace", "--", sys.executable, "-c", "pass"), 2, "expected a trace with steps"),
        (("trace", "--", sys.executable, "-c", "exit(3)"), 3, ""),
        (("parity", ".", "."), 2, "expected a trace with steps"),
        (("parity", "."), 2, "expected a spec, two traces, or a trace and a spec"),
        (("trace", "--", "sh", "-c", "kill -9 $$"), 137, ""),
    ],
)
def test_mistakes_are_told(words: tuple[str, ...], status: int, told: str, tmp_path: Path) -> None:
    found = isotrain(*words, folder=tmp_path)
    assert told in found.stderr
    assert found.returncode == status, found.stderr
