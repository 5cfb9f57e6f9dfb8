"""Specs, backends, strategies and machines with and without what each code of `isotrain check` finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isotrain.analysis.check.findings import CheckResult
from isotrain.core.contracts.backend.adapter import Adapter
from isotrain.core.contracts.backend.capabilities import (
    Availability,
    Capabilities,
    Capability,
    Examination,
)
from isotrain.core.contracts.backend.group_hooks import Trait
from isotrain.core.contracts.strategy import Strategy
from isotrain.core.errors import (
    UnsupportedError,
)
from isotrain.core.spec.training_spec import TrainingSpec

CORES = 4
MEMORY, GPU_MEMORY = 130, 125
"""Bytes of the machine, and of a GPU."""


class First(Adapter):
    """An adapter that declares and never starts; its wire works between CPUs, its beam never."""

    name = "first"
    framework = "one"
    summary = "for tests"
    collectives = {"auto": "picks wire", "wire": "a wire", "beam": "between GPUs"}
    replicas_per_process = "one"
    capabilities = {
        "replicated": Capabilities(
            frozenset({Capability.SYNCHRONOUS_STEP, Capability.LOCAL_STEP, Capability.COMPUTE}),
            {Capability.SUBGROUPS: "not built"},
        ),
        "sharded": Capabilities(
            frozenset(
                {
                    Capability.REDUCE_SCATTER_GRADIENTS,
                    Capability.COMPUTE,
                    Capability.UPDATE_SHARD,
                }
            )
        ),
    }
    options = {"size": "of a bucket"}
    gpus = 0

    def availability(self) -> Availability:
        return Availability(True, "1.0")

    def examine(self) -> Examination:
        return Examination(self.availability())

    def accelerators(self) -> int:
        return self.gpus

    def resolve_collective(self, requested: str | None, *, device: Any, replicas: int) -> str:
        if requested == "beam":
            raise UnsupportedError("beam exchanges between GPUs")
        return "wire"

    def environment_variables(self, **resolved: Any) -> dict[str, str]:
        return {}

    def start(self, spec: Any, backend_config: Any, context: Any) -> Any:
        raise AssertionError("a check starts nothing here")


class Synchronising(First):
    name = "synchronising"
    sync_batchnorm_devices = frozenset({"cpu"})  # type: ignore[assignment]


class Second(First):
    name = "second"
    framework = "two"


class Missing(First):
    name = "missing"

    def availability(self) -> Availability:
        return Availability(False, None, "it is not installed", "install it")


class WithGPUs(First):
    name = "with-gpus"
    gpus = 2
    capabilities = {
        **First.capabilities,
        "sharded": Capabilities(First.capabilities["sharded"].has | {Capability.SUBGROUPS}),
        "pipeline": Capabilities(frozenset({Capability.PIPELINE_STEP})),
        "fully-sharded": Capabilities(
            frozenset({Capability.SYNCHRONOUS_STEP, Capability.UNSHARD_WEIGHTS})
        ),
    }
    start_pipeline = start_fully_sharded = First.start

    def check_layout(self, spec: Any, parallel_layout: str) -> list[str]:
        return ["weights are joined early"] if parallel_layout == "fully-sharded" else []


class Noting(First):
    name = "noting"

    def check(self, spec: Any, options: Any, *, replicas: int) -> list[str]:
        return ["it rounds"]


class _Local(Strategy):
    name = "alone"
    summary = "for tests"
    requires = frozenset({Capability.LOCAL_STEP})

    def step(self, group: Any, batch: Any, learning_rate: float) -> Any:
        raise AssertionError("a check takes no step")


class _Agreeing(_Local):
    name = "agreeing"
    equals_data_parallel = True


class _Rounding(_Local):
    name = "rounding"
    requires = frozenset({Capability.SYNCHRONOUS_STEP})


class _Demanding(_Local):
    name = "demanding"
    requires = frozenset({Capability.SUBGROUPS})


def own_metric(targets: Any, predictions: Any) -> Any:
    return targets


def other(*given: Any) -> Any:
    return given


@dataclass
class Scene:
    """What is checked: the spec's fields, where, and what a process would see.

    Attributes:
        fields: Of the spec, besides those of a sound one.
        backends: Asked for.
        replicas: Asked for.
        traits: Of the one layer that the model has.
        samples: In the data; None for a stream.
        fails: Whether the process that looks at data and model fails.
        fault: What goes wrong in a first step.
        refused: What several replicas are refused for.
        weights: The bytes of each.
        refuses_single_sample: The layer that takes no slice of one sample.
        shared_weights: Names of weights that several updates change.
        teacher_weights: Names of trainable weights of a teacher.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    backends: tuple[str, ...] = ("first",)
    replicas: tuple[int, ...] = (1, 2)
    traits: tuple[Trait, ...] = ()
    samples: int | None = 96
    fails: bool = False
    fault: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[int, ...] = ()
    refuses_single_sample: str | None = None
    shared_weights: tuple[str, ...] = ()
    teacher_weights: tuple[str, ...] = ()


Check = Callable[..., CheckResult]


def spec(**fields: Any) -> TrainingSpec:
    sound = {
        "name": "sound",
        "model": dict,
        "data": dict,
        "loss": "mean_squared_error",
        "metrics": ["accuracy"],
        "optimizer": {"name": "sgd", "lr": 0.5},
        "global_batch_size": 24,
        "epochs": 3,
    }
    return TrainingSpec(**{k: v for k, v in {**sound, **fields}.items() if v is not None})


def scaled(rule: str, batch: int = 24, **fields: Any) -> dict[str, Any]:
    """Fields of a spec whose rate is for 3 samples unless it says otherwise."""
    return {"scaling": {"rule": rule, "base_batch_size": 3}, "global_batch_size": batch, **fields}


ADAM = {"name": "adam", "lr": 0.1}
WARM = {"name": "constant", "warmup_epochs": 1}
BOTH = ("first", "second")
TABLE = {"one": dict, "two": other}
OWN = {"one": "mse", "two": "mae"}
DECAY = {"name": "sgd", "lr": 0.1, "weight_decay": 0.1}
DECOUPLED = {"name": "adamw", "lr": 0.1}
SUMMED = {"name": "mean_squared_error", "reduction": "sum"}
MEAN = {"name": "mean_squared_error", "reduction": "sum_over_batch_size"}
LOCAL = (Trait.LOCAL_STATISTICS,)
GLOBAL = (Trait.GLOBAL_STATISTICS,)
RANDOM = (Trait.RANDOM,)
CASES: dict[str, tuple[Scene, Scene]] = {
    "ISO101": (Scene(traits=LOCAL), Scene(traits=LOCAL, replicas=(1,))),
    "ISO102": (Scene(traits=RANDOM), Scene(traits=RANDOM, replicas=(1,))),
    "ISO103": (
        Scene(traits=RANDOM, backends=BOTH),
        Scene({"random_layers": "per-sample"}, BOTH, traits=RANDOM),
    ),
    "ISO104": (Scene(traits=GLOBAL), Scene(traits=GLOBAL, backends=("synchronising",))),
    "ISO105": (Scene(traits=(Trait.LOWER_PRECISION,)), Scene(traits=LOCAL)),
    "ISO106": (Scene({"model": TABLE}, BOTH), Scene({"model": TABLE})),
    "ISO107": (Scene(traits=(Trait.HIDDEN,)), Scene(traits=LOCAL)),
    "ISO108": (Scene({"gradient_accumulation_steps": 2}, traits=LOCAL), Scene(traits=LOCAL)),
    "ISO109": (Scene(traits=(Trait.CUSTOM_TRAINING,)), Scene(traits=LOCAL)),
    "ISO110": (Scene(traits=(Trait.WITHOUT_GRADIENT,)), Scene(traits=LOCAL)),
    "ISO201": (Scene({"global_batch_size": None, "local_batch_size": 8}), Scene()),
    "ISO202": (Scene(scaled("none")), Scene(scaled("none", 3), replicas=(1,))),
    "ISO203": (Scene(scaled("linear")), Scene(scaled("linear", schedule=WARM))),
    "ISO204": (Scene(scaled("linear", optimizer=ADAM)), Scene(scaled("sqrt", optimizer=ADAM))),
    "ISO205": (Scene({"global_batch_size": 25}), Scene({"global_batch_size": 25}, replicas=(1, 5))),
    "ISO206": (Scene(samples=1), Scene(samples=2)),
    "ISO207": (
        Scene({"gradient_accumulation_steps": 5}),
        Scene({"gradient_accumulation_steps": 3}),
    ),
    "ISO208": (
        Scene({"gradient_accumulation_steps": 13}),
        Scene({"gradient_accumulation_steps": 12}),
    ),
    "ISO209": (Scene(samples=97), Scene({"drop_remainder": True}, samples=97)),
    "ISO210": (Scene(samples=None), Scene(samples=None, replicas=(1,))),
    "ISO211": (Scene({"epochs": None, "steps": 5}), Scene({"epochs": None, "steps": 8})),
    "ISO212": (Scene(samples=23), Scene(samples=24)),
    "ISO213": (Scene({"drop_remainder": True}, samples=23), Scene(samples=23)),
    "ISO214": (Scene({"shuffle": False}), Scene()),
    "ISO215": (
        Scene({"shuffle": False, "drop_remainder": True}, samples=97),
        Scene({"drop_remainder": True}, samples=97),
    ),
    "ISO216": (
        Scene(samples=99, refuses_single_sample="norm (N)"),
        Scene({"drop_remainder": True}, samples=99, refuses_single_sample="norm (N)"),
    ),
    "ISO217": (Scene(traits=LOCAL, samples=97), Scene(traits=LOCAL, samples=100)),
    "ISO218": (
        Scene(refused={"ISO218": "others"}),
        Scene(refused={"ISO218": "others"}, replicas=(1,)),
    ),
    "ISO219": (Scene({"ema": {"start": 12}}), Scene({"ema": {"start": 11}})),
    "ISO301": (Scene({"loss": SUMMED}), Scene({"loss": MEAN})),
    "ISO302": (Scene({"metrics": [own_metric]}), Scene({"metrics": ["mae"]})),
    "ISO303": (Scene({"loss": OWN}, BOTH), Scene({"loss": {"one": "mse", "two": "mse"}}, BOTH)),
    "ISO304": (
        Scene({"model": TABLE, "optimizer": DECAY}, BOTH),
        Scene({"model": TABLE, "optimizer": DECOUPLED}, BOTH),
    ),
    "ISO305": (Scene({"strategy": "rounding"}), Scene({"strategy": "agreeing"})),
    "ISO306": (Scene(shared_weights=("d/kernel",)), Scene()),
    "ISO307": (Scene(teacher_weights=("teacher/kernel",)), Scene()),
    "ISO401": (Scene(backends=("first", "missing")), Scene()),
    "ISO402": (Scene(backends=("first:beam",)), Scene(backends=("first:wire",))),
    "ISO403": (Scene(backends=("with-gpus",), replicas=(3,)), Scene(backends=("with-gpus",))),
    "ISO404": (Scene(replicas=(CORES + 1,)), Scene(replicas=(CORES,))),
    "ISO405": (Scene({"threads": 3}), Scene({"threads": 2})),
    "ISO406": (
        Scene({"device": "gpu"}, ("with-gpus",), replicas=(3,)),
        Scene({"device": "gpu"}, ("with-gpus",)),
    ),
    "ISO407": (Scene(weights=(10, 10)), Scene(weights=(10, 10), replicas=(1,))),
    "ISO501": (Scene({"strategy": "demanding"}), Scene()),
    "ISO502": (Scene(fails=True), Scene()),
    "ISO503": (Scene(backends=("noting",)), Scene()),
    "ISO504": (Scene(fault="the loss returned None"), Scene()),
}
