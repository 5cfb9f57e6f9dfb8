"""Checks and figures of isotrain on the GPUs of this machine, and a report of them as JSON.

    python -m isotrain.testing.gpu_report                    # about 10 minutes on one GPU
    python -m isotrain.testing.gpu_report --output gpu.json  # also written to a file
    python -m isotrain.testing.gpu_report --check precision --check resume
    python -m isotrain.testing.gpu_report --minutes 30       # instead of 10 with one GPU, 20 with several
    python -m isotrain.testing.gpu_report --device cpu       # the same checks on CPUs, to try the report

Every check runs in a process of its own, with a time limit. One that fails or hangs leaves the others alone.
Those for which no time is left, or too little, are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from isotrain.core import api
from isotrain.core.planning.doctor import examine
from isotrain.core.plugins.manager import plugin_manager
from isotrain.core.reporting.tables import paragraph, table
from isotrain.core.system import hardware
from isotrain.core.system.version import installed_versions
from isotrain.testing import native_equality
from isotrain.testing.gpu_speed import speed, synchronize
from isotrain.testing.launching import DEVICE_VARIABLE

BACKEND = "torch-ddp"
OTHER_BACKENDS = ("tf-mirrored", "tf-multiworker", "horovod-torch", "horovod-tf")
SAMPLES, FEATURES, CLASSES = 96, 24, 8
Figures = dict[str, Any]


def _device() -> str:
    return os.environ.get(DEVICE_VARIABLE, "gpu")


def data(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Inputs [SAMPLES, FEATURES] of a dtype, and classes [SAMPLES] (int64)."""
    generator = np.random.default_rng(3)
    classes = generator.integers(CLASSES, size=SAMPLES)
    centers = generator.normal(size=(CLASSES, FEATURES))
    inputs = centers[classes] + 0.5 * generator.normal(size=(SAMPLES, FEATURES))
    return inputs.astype(dtype), classes


def data64() -> tuple[np.ndarray, np.ndarray]:
    """The data in float64."""
    return data("float64")


def native_model() -> Any:
    """A torch module: dense layers with layer normalization."""
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64),
        torch.nn.LayerNorm(64),
        torch.nn.GELU(),
        torch.nn.Linear(64, CLASSES),
    )


def portable_model() -> Any:
    """A Keras model: dense layers with batch normalization."""
    import keras

    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(CLASSES),
        ]
    )


def _spec(portable: bool = False, **fields: Any) -> dict[str, Any]:
    model = portable_model if portable else {"torch": native_model}
    return {
        "model": model,
        "data": data64 if fields.get("precision") == "float64" else data,
        "loss": {"name": "sparse_categorical_crossentropy", "from_logits": True},
        "optimizer": {"name": "adam", "lr": 2.0**-8},
        "global_batch_size": 12,
        "epochs": 3,
        "seed": 11,
        "device": _device(),
        **fields,
    }


def _losses(
    specs: Mapping[str, Mapping[str, Any]], replicas: int = 1, backend: str = BACKEND
) -> dict[str, np.ndarray]:
    """Losses of all steps by spec name, float64 [steps]; one run trains the specs in turn."""
    results = native_equality.trained_in_turn(specs, backend, replicas)
    return {name: np.array(result["loss"]) for name, result in results.items()}


def _models(**fields: Any) -> dict[str, dict[str, Any]]:
    """The spec with a native and with a portable model."""
    return {"native": _spec(**fields), "portable": _spec(True, **fields)}


def _on_cpu(specs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {**spec, "device": "cpu"} for name, spec in specs.items()}


def _differences(
    left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray], limit: float
) -> Figures:
    """The largest relative difference by name; fails with all of them where one exceeds the limit."""
    found = {name: _difference(values, right[name]) for name, values in left.items()}
    wrong = [name for name, value in found.items() if not value <= limit]
    assert not wrong, f"{', '.join(wrong)}: {found}"
    return found


def _difference(left: np.ndarray, right: np.ndarray) -> float:
    """The largest relative difference of two arrays of one shape; NaN never passes a comparison."""
    return float((np.abs(left - right) / np.maximum(np.abs(right), 1e-30)).max())


def conformance() -> Figures:
    """Every check of the conformance kit, with two replicas that share a GPU over Gloo."""
    from isotrain.testing.backend import check_backend

    return _card(check_backend(f"{BACKEND}:gloo", replicas=2))


def conformance_of_all_gpus() -> Figures:
    """Every check of the conformance kit, with one GPU for each replica, on each backend with NCCL."""
    if _device() == "cpu":
        return {"skipped": "NCCL is for GPUs"}
    gpus = hardware.visible_gpus()
    if gpus < 2:
        return {"skipped": f"{gpus} GPUs are visible, and NCCL needs one for each of two replicas"}
    from isotrain.testing.backend import check_backend

    plugins = plugin_manager()
    names = [n for n in (BACKEND, *OTHER_BACKENDS) if plugins.backend(n).accelerators() >= 2]
    if not names:
        return {"skipped": f"{gpus} GPUs are visible, and no backend can use two of them"}
    return {name: _card(check_backend(f"{name}:nccl", replicas=gpus)) for name in names}


def _card(card: Any) -> Figures:
    assert card.passed, f"{card.name}: {json.dumps(card.failures, indent=1)}"
    verdicts = [outcome.verdict for outcome in card.outcomes]
    return {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}


def native_equality_on_device() -> Figures:
    """A native model's weights have the bits of a loop in torch alone."""
    spec = _spec(optimizer={"name": "sgd", "lr": 0.0625, "momentum": 0.875}, shuffle=False)
    ours = native_equality.trained(spec, BACKEND, 1)
    native_equality.assert_native_equality(ours, _loop_by_hand)
    return {"weights": len(ours["weights"])}


def _loop_by_hand(start: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch

    device = torch.device("cuda" if _device() == "gpu" else "cpu")
    torch.set_num_threads(hardware.cores())
    model = native_model().to(device)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in start.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.875)
    inputs, classes = (torch.from_numpy(array).to(device) for array in data())
    for _ in range(3):
        for first in range(0, SAMPLES, 12):
            optimizer.zero_grad()
            logits = model(inputs[first : first + 12])
            torch.nn.functional.cross_entropy(logits, classes[first : first + 12]).backward()
            optimizer.step()
    return {name: value.cpu().numpy() for name, value in model.state_dict().items()}


def parity_with_cpu() -> Figures:
    """In float64, losses equal those of a CPU to 1e-9, for a native and a portable model."""
    specs = _models(precision="float64")
    return _differences(_losses(specs), _losses(_on_cpu(specs)), 1e-9)


def parity_of_backends() -> Figures:
    """In float64, a replica of each other backend has the losses of torch on a CPU to 1e-7.

    TensorFlow's GELU differs from torch's by some 1e-9.
    """
    spec = {"portable": _spec(True, precision="float64")}
    plugins, found = plugin_manager(), {}
    expected = _losses(_on_cpu(spec))
    for name in OTHER_BACKENDS:
        adapter = plugins.backend(name)
        if not adapter.availability().available:
            found[name] = "not installed"
        elif _device() == "gpu" and not adapter.accelerators():
            found[name] = "built without NCCL, or for CPUs"
        else:
            found[name] = _differences(_losses(spec, backend=name), expected, 1e-7)["portable"]
    return found


def parity_of_replicas() -> Figures:
    """In float64, two replicas have the losses of one to 1e-9, in even and uneven batches."""
    specs = {"native": _spec(precision="float64", global_batch_size=13)}
    return _differences(_losses(specs, 2, f"{BACKEND}:gloo"), _losses(specs), 1e-9)


def precision() -> Figures:
    """Mixed precision trains: losses in float16 with loss scaling, and in bfloat16, are near float32's.

    That is, within 5 % of the first loss.
    """
    names = ("float32", "float16", "bfloat16")
    specs = {
        f"{name} {kind}": spec for name in names for kind, spec in _models(precision=name).items()
    }
    losses, found = _losses(specs), {}
    for name, values in losses.items():
        exact = losses[f"float32 {name.split()[1]}"]
        found[name] = float(np.abs(values - exact).max() / exact[0])
    assert max(found.values()) < 0.05, found
    return found


def step_variants() -> Figures:
    """A captured step, and one by `torch.compile`, have the losses of a plain one to 1e-4 (float32)."""
    plain = _losses(_models(capture=False))
    found = _differences(_losses(_models()), plain, 1e-4)
    compiled = _losses({"native": _spec(compile=True)})
    return {**found, "compiled": _differences(compiled, plain, 1e-4)["native"]}


def resume() -> Figures:
    """A run goes on from GPU to CPU and back, with the losses of an uninterrupted run to 1e-9 (float64)."""
    found = {}
    for name, spec in _models(precision="float64", checkpoint={"every_epochs": 1}).items():
        undisturbed = api.run(spec, backend=BACKEND, replicas=1, on_event=_silent)
        for first, second in dict.fromkeys(((_device(), "cpu"), ("cpu", _device()))):
            half = api.run(
                {**spec, "device": first, "epochs": 1},
                backend=BACKEND,
                replicas=1,
                on_event=_silent,
            )
            rest = api.run(
                {**spec, "device": second},
                backend=BACKEND,
                replicas=1,
                resume=half.run_directory,
                on_event=_silent,
            )
            pair = f"{name} {first} to {second}"
            found[pair] = max(
                _difference(value, undisturbed.weights[weight]) if value.any() else 0.0
                for weight, value in rest.weights.items()
            )
    assert max(found.values()) < 1e-9, found
    return found


def _silent(event: Mapping[str, Any]) -> None:
    """Ignores an event."""


_FEATURES: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"clip": {"global_norm": 0.5}},
    "ema": {"ema": {"decay": 0.9}},
    "gradient norm": {"gradient_norm": True},
    "metrics": {"metrics": ["accuracy"]},
    "skip": {"on_nan": "skip"},
    "sharded": {"strategy": "sharded"},
    "lamb": {"optimizer": {"name": "lamb", "lr": 2.0**-8}},
    "cosine": {"schedule": {"name": "cosine"}},
}


def features_native() -> Figures:
    """Options of the step, with a native model: in float64, losses equal those of a CPU to 1e-8."""
    return _features(False)


def features_portable() -> Figures:
    """Options of the step, with a portable model: in float64, losses equal those of a CPU to 1e-8."""
    return _features(True)


def _features(portable: bool) -> Figures:
    specs = {
        name: _spec(portable, precision="float64", **fields) for name, fields in _FEATURES.items()
    }
    losses = _losses(specs)
    on_cpu = losses if _device() == "cpu" else _losses(_on_cpu(specs))
    return _differences(losses, on_cpu, 1e-8)


def strategies() -> Figures:
    """Strategies on GPUs: losses equal those of CPUs to 1e-8 (float64); two replicas share a GPU over Gloo.

    `compressed` rounds to float16, so it is allowed 1e-3.
    """
    shared = {
        "local-sgd": {"name": "local-sgd", "options": {"every": 2}},
        "compressed": {"name": "compressed", "options": {"method": "fp16"}},
        "hierarchical": {"name": "hierarchical"},
        "sharded": {"name": "sharded"},
    }
    specs = {name: _spec(precision="float64", strategy=each) for name, each in shared.items()}
    backend = f"{BACKEND}:gloo"
    here, on_cpu = _losses(specs, 2, backend), _losses(_on_cpu(specs), 2, backend)
    found = _differences({"compressed": here.pop("compressed")}, on_cpu, 1e-3)
    fully = {"name": "sharded", "options": {"stage": 3}}
    alone = {"sharded,stage=3": _spec(precision="float64", strategy=fully)}
    alone_here = _losses(alone)
    return {
        **found,
        **_differences(here, on_cpu, 1e-8),
        **_differences(alone_here, _losses(_on_cpu(alone)), 1e-8),
    }


def copies() -> Figures:
    """Batches are copied from pinned memory, so that copies overlap with computation."""
    if _device() == "cpu":
        return {"skipped": "a CPU needs no copies"}
    spec = _spec(steps=10, epochs=None)
    (kinds,) = api.launch(_copy_kinds, spec, backend=BACKEND, replicas=1, on_event=_silent)
    assert any("Pinned -> Device" in kind for kind in kinds), kinds
    assert not any("Pageable -> Device" in kind for kind in kinds), kinds
    return {"copies": kinds}


def _copy_kinds(session: Any) -> list[str]:
    """Names of the copies to the device that torch's profiler saw in the steps after the first five."""
    import torch

    batches = session.batches()
    for _ in range(5):
        session.step(next(batches))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in batches:
            session.step(batch)
        synchronize()
    names = [str(event.key) for event in profile.key_averages()]
    return sorted(name for name in names if name.startswith("Memcpy"))


CHECKS: dict[str, tuple[Callable[[], Figures], int]] = {
    "conformance": (conformance, 240),
    "features-portable": (features_portable, 300),
    "features-native": (features_native, 240),
    "resume": (resume, 300),
    "strategies": (strategies, 240),
    "precision": (precision, 240),
    "step-variants": (step_variants, 300),
    "native-equality": (native_equality_on_device, 120),
    "parity-with-cpu": (parity_with_cpu, 180),
    "parity-of-backends": (parity_of_backends, 300),
    "parity-of-replicas": (parity_of_replicas, 120),
    "copies": (copies, 120),
    "speed": (speed, 240),
    "conformance-nccl": (conformance_of_all_gpus, 900),
}
"""Checks by name, with their time limits in seconds."""
_CORES_PER_CHECK = 4
ALONE = ("speed", "conformance-nccl")
"""Checks that are made last, one after the other; the others are made several at a time."""
_TIMED_SECONDS = 200
"""Time that is kept for the check `speed`."""


def machine() -> Figures:
    """Card, driver, versions and commit."""
    torch_build = json.loads(_output([sys.executable, "-c", _TORCH_VERSIONS]) or "null")
    seen_by_torch = torch_build["cards"] if torch_build else []
    return {
        **hardware.describe(),
        "cards": hardware.gpu_names() or seen_by_torch,
        "versions": installed_versions(
            ("torch", "keras", "tensorflow", "tensorflow-cpu", "horovod", "numpy")
        ),
        "torch": torch_build,
        "commit": _output(_COMMIT).strip(),
    }


def reason_for_no_gpu(torch_build: Figures | None) -> str | None:
    """Reason why torch can use no GPU here; None if it can.

    Args:
        torch_build: What `machine` says of torch; None if torch cannot be imported.
    """
    if torch_build is not None and torch_build["capability"]:
        return None
    if torch_build is not None and not torch_build["cuda"]:
        kind = "for ROCm, which isotrain does not use" if torch_build["hip"] else "without CUDA"
        return f"torch {torch_build['version']} is a build {kind}"
    (backend,) = examine(plugin_manager(), [BACKEND])["backends"]
    if not backend["available"]:
        return str(backend["reason"])
    return str(next(each["reason"] for each in backend["collectives"] if each["name"] == "nccl"))


TORCH = "torch>=2.11,<2.14"
"""The versions of torch that isotrain takes; with newer ones, its probes of private APIs decide."""


def reason_for_old_torch(torch_build: Figures | None) -> str | None:
    """Reason why no check is made on any device: torch is too old; None if it is not.

    Args:
        torch_build: What `machine` says of torch; None if torch cannot be imported.
    """
    if torch_build is None or _major_minor(torch_build["version"]) >= _major_minor(TORCH):
        return None
    return (
        f"torch {torch_build['version']} was found, which is older than isotrain takes ({TORCH})."
        f" Install one of these: pip install '{TORCH}'"
    )


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


_COMMIT = [
    *("git", "-c", "safe.directory=*"),  # the checkout may be another user's
    *("-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
]
_TORCH_VERSIONS = """
import json, torch
cuda = torch.version.cuda and torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "hip": torch.version.hip,
    "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    "capability": torch.cuda.get_device_capability() if cuda else None,
    "cards": [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count() if cuda else 0)],
}))
"""


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the checks and prints the report; 1 when one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="append", choices=list(CHECKS), help="only this; repeatable"
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument(
        "--minutes",
        type=float,
        help="time for all checks; left out: 10, or 20 with several GPUs, and no limit on CPUs",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--in-this-process", choices=list(CHECKS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ[DEVICE_VARIABLE] = options.device
    if options.in_this_process:
        return _make(options.in_this_process, options.folder)
    report: Figures = {"machine": machine(), "device": options.device, "checks": {}}
    lock = threading.Lock()

    def write() -> None:
        if options.output:
            options.output.write_text(json.dumps(report, indent=1), encoding="utf-8")

    def make(name: str) -> None:
        print(f"{name}: begins", file=sys.stderr, flush=True)
        outcome = in_process(name, options.device, limit_of(name, deadline, names))
        told = f"{name}: {outcome['verdict']} in {outcome['seconds']:.0f} s"
        print(told, file=sys.stderr, flush=True)
        with lock:
            report["checks"][name] = outcome
            write()

    names = options.check or list(CHECKS)
    deadline = deadline_of(options.minutes, options.device)
    torch_build = report["machine"]["torch"]
    report["why_no_check"] = why_no_check = reason_for_old_torch(torch_build)
    may_use_gpu = options.device == "gpu" and not why_no_check
    report["why_no_gpu"] = why_no_gpu = reason_for_no_gpu(torch_build) if may_use_gpu else None
    write()  # a file that cannot be written is noticed before the checks
    if why_no_check:
        print(f"No check is made: {why_no_check}", file=sys.stderr)
        return 2
    if why_no_gpu:
        told = f"torch can use no GPU here: {why_no_gpu}. --device cpu makes the checks on CPUs."
        print(told, file=sys.stderr)
        return 2
    try:
        with ThreadPoolExecutor(max(1, hardware.cores() // _CORES_PER_CHECK)) as pool:
            list(pool.map(make, [name for name in names if name not in ALONE]))
        for name in ALONE:
            if name in names:
                make(name)
    except KeyboardInterrupt:
        print(_text(report))
        return 130
    print(_text(report))
    return int(any(each["verdict"] == "failed" for each in report["checks"].values()))


def deadline_of(minutes: float | None, device: str) -> float:
    """Time, by `time.monotonic`, at which the last check has ended."""
    if minutes is None:
        minutes = math.inf if device == "cpu" else 10 if hardware.visible_gpus() < 2 else 20
    return time.monotonic() + 60 * minutes


def limit_of(name: str, deadline: float, names: Sequence[str]) -> float:
    """Seconds that a check of the named ones may take from now on; not positive where none are left.

    The checks before `speed` leave it its time.
    """
    left = deadline - time.monotonic()
    if name not in ALONE and "speed" in names:
        left -= _TIMED_SECONDS
    return min(CHECKS[name][1], left)


def _make(name: str, folder: Path) -> int:
    """Makes one check, in a folder for its files; its last line of output is the outcome as JSON."""
    try:
        with contextlib.chdir(folder):
            outcome = {"verdict": "passed", "figures": CHECKS[name][0]()}
        if "skipped" in outcome["figures"]:
            outcome["verdict"] = "skipped"
    except BaseException as error:
        outcome = {"verdict": "failed", "figures": {}, "error": _described(error)}
    print(json.dumps(outcome))
    return 0


def _described(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]


def in_process(name: str, device: str, limit: float) -> Figures:
    """Makes one check in a process of its own; skips it where no time is left.

    One that exceeds its own time limit is aborted, and its error is the stack of each thread.
    One that the end of the time for all checks cuts short is skipped, too.

    Args:
        name: Name of the check.
        device: `gpu` or `cpu`.
        limit: Time limit in seconds, at most the check's own.
    """
    if limit <= 0:
        figures = {"skipped": "no time is left; --minutes gives more"}
        return {"verdict": "skipped", "figures": figures, "seconds": 0.0}
    # runs write their files into the current folder, which may be somebody else's
    prefix = "isotrain-gpu-report-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        return _made_in_folder(name, device, limit, folder)


def _made_in_folder(name: str, device: str, limit: float, folder: str) -> Figures:
    module = "isotrain.testing.gpu_report"
    arguments = ["--device", device, "--in-this-process", name, "--folder", folder]
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=limit)
        outcome = json.loads(output.splitlines()[-1])
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        error = f"{process.communicate()[1][-6000:]}\nno end after {limit:.0f} s"
        outcome = {"verdict": "failed", "error": error}
        if limit < CHECKS[name][1]:
            skipped = f"no end in the {limit:.0f} s that were left; --minutes gives more"
            outcome = {"verdict": "skipped", "figures": {"skipped": skipped}}
    except (IndexError, ValueError):
        error = f"{errors[-3000:]}\nexit code {process.returncode}"
        outcome = {"verdict": "failed", "error": error}
    return {**outcome, "seconds": round(time.monotonic() - started, 1)}


def _text(report: Figures) -> str:
    rows = [
        (name, each["verdict"], f"{each['seconds']:.0f} s", _brief(each))
        for name, each in report["checks"].items()
    ]
    heading = "; ".join(report["machine"]["cards"]) or "no NVIDIA GPU"
    return "\n".join([paragraph(heading), table(("check", "outcome", "time", "figures"), rows)])


def _brief(outcome: Figures) -> str:
    if "error" in outcome:
        return str(outcome["error"]).strip().splitlines()[-1][:200]
    return re.sub(r'[{}"]', "", json.dumps(outcome["figures"]))


if __name__ == "__main__":
    sys.exit(main())
