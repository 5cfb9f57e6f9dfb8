"""Fields of a spec as `TypedDict`s, for editors that complete mappings; `tools/spec_fields.py` writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

# fmt: off
# ruff: noqa: E501

class AdagradFields(TypedDict, total=False):
    """Adagrad."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    name: Literal['adagrad']
    initial_accumulator_value: float
    epsilon: float


class AdamFields(TypedDict, total=False):
    """Adam."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    beta_1: float
    beta_2: float
    epsilon: float
    name: Literal['adam']
    amsgrad: bool


class AdamWFields(TypedDict, total=False):
    """Adam with decoupled weight decay."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    beta_1: float
    beta_2: float
    epsilon: float
    name: Literal['adamw']
    amsgrad: bool


class BalancedOrderFields(TypedDict, total=False):
    """All classes equally often, spread evenly; each class is shuffled, and begun again at its end."""

    name: Literal['balanced']
    by: str
    samples: int | None


class ByLengthOrderFields(TypedDict, total=False):
    """Global batches of samples of similar length, shuffled."""

    name: Literal['by-length']
    lengths: str
    buckets: Sequence[int] | None
    tokens: int | None


class CallableOrderFields(TypedDict, total=False):
    """An order of your own: a pure function, which every process calls once per epoch."""

    call: str


class CallableScheduleFields(TypedDict, total=False):
    """A schedule of your own: a function from the step to the fraction of the peak rate."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    call: str


class CheckpointPolicyFields(TypedDict, total=False):
    """Intervals at which checkpoints are saved, besides at the end and on a signal; and how many are kept."""

    every_steps: int | None
    every_epochs: int | None
    every_minutes: float | None
    background: bool
    keep_last: int | None
    keep_best: str | KeepBestFields | None
    folder: str | None
    map: str | Any | None


class ClipFields(TypedDict, total=False):
    """Clipping of the mean gradient of the global batch; exactly one of the fields."""

    value: float | None
    norm: float | None
    global_norm: float | None


class ConstantScheduleFields(TypedDict, total=False):
    """Constant learning rate after the warm-up."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    name: Literal['constant']


class CosineRestartsScheduleFields(TypedDict, total=False):
    """Cosine decay with warm restarts (Loshchilov & Hutter 2017): each cycle begins at a peak again."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    name: Literal['cosine-restarts']
    first_epochs: int | None
    first_steps: int | None
    length_factor: float
    peak_factor: float
    final_fraction: float


class CosineScheduleFields(TypedDict, total=False):
    """Cosine decay of the learning rate."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    final_fraction: float
    decay_steps: int | None
    name: Literal['cosine']


class CustomOptimizerFields(TypedDict, total=False):
    """Custom optimizer, built by your own callable; isotrain knows nothing of its update rule."""

    custom: str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]]
    lr: float
    args: Mapping[str, Any]


class EarlyStoppingFields(TypedDict, total=False):
    """Early stopping: ends training when a metric stops improving."""

    metric: str
    mode: Literal['min', 'max'] | None
    patience: int
    min_delta: float


class ElasticFields(TypedDict, total=False):
    """Training that goes on without a restart when processes are lost or join."""

    min: int
    max: int | None
    replacements: int


class EmaFields(TypedDict, total=False):
    """Exponential moving average of the weights."""

    every: int
    start: int
    decay: float


class EvaluationFields(TypedDict, total=False):
    """Evaluation: intervals and batch size."""

    every_epochs: int
    every_steps: int | None
    at_start: bool
    batch: int | None


class ExponentialScheduleFields(TypedDict, total=False):
    """Exponential decay: as step decay, but smooth, and from the end of the warm-up."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    every_epochs: int | None
    every_steps: int | None
    factor: float
    name: Literal['exponential']


class InitialWeightsFields(TypedDict, total=False):
    """Initial weights of a run, and the weights that are frozen."""

    source: str
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    map: str | Any | None
    freeze: str | Sequence[str]


class InverseSqrtScheduleFields(TypedDict, total=False):
    """Inverse square root of the step (Vaswani et al. 2017), equal to the peak at the warm-up's end."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    name: Literal['inverse-sqrt']
    timescale_steps: int | None


class KeepBestFields(TypedDict, total=False):
    """The metric by which one checkpoint is the best."""

    metric: str
    mode: Literal['min', 'max'] | None
    restore: bool


class LambFields(TypedDict, total=False):
    """LAMB: Adam with layer-wise trust ratios, for large batches."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    beta_1: float
    beta_2: float
    epsilon: float
    name: Literal['lamb']


class LayerDecayFields(TypedDict, total=False):
    """Layer-wise decay of the learning rate: the last layer has the full rate, each one before it less."""

    factor: float
    layers: Sequence[str | Sequence[str]]


class LinearScheduleFields(TypedDict, total=False):
    """Linear decay of the learning rate."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    final_fraction: float
    decay_steps: int | None
    name: Literal['linear']


class LinearValueFields(TypedDict, total=False):
    """A value that changes linearly from one number to another, and stays there."""

    name: Literal['linear']
    start: float
    end: float
    steps: int


class LionFields(TypedDict, total=False):
    """Lion: steps of one size, in the signs of the momentum."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    name: Literal['lion']
    beta_1: float
    beta_2: float


class LoaderOptionsFields(TypedDict, total=False):
    """Worker processes that make samples ahead of the steps that need them."""

    workers: int | None
    prefetch: int
    start: Literal['spawn', 'fork']


class LoggerChoiceFields(TypedDict, total=False):
    """A logger and its options."""

    name: str
    options: Mapping[str, Any]


class LossScaleFields(TypedDict, total=False):
    """Dynamic loss scaling for float16."""

    initial: float
    growth_steps: int


class MilestonesScheduleFields(TypedDict, total=False):
    """Decay at milestones: the learning rate is multiplied by a factor at each."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    name: Literal['milestones']
    at_epochs: Sequence[int] | None
    at_steps: Sequence[int] | None
    factor: float


class MuonFields(TypedDict, total=False):
    """Muon for the weights that are matrices: orthogonalized momentum. AdamW for all others."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    beta_1: float
    beta_2: float
    epsilon: float
    name: Literal['muon']
    momentum: float
    nesterov: bool
    orthogonalize: bool


class NadamFields(TypedDict, total=False):
    """NAdam: Adam with Nesterov's momentum."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    beta_1: float
    beta_2: float
    epsilon: float
    name: Literal['nadam']


class OneCycleScheduleFields(TypedDict, total=False):
    """One cycle (Smith & Topin 2018): up to the peak rate and down to nearly 0, momentum the other way."""

    name: Literal['one-cycle']
    rise_fraction: float
    start_fraction: float
    final_fraction: float
    shape: Literal['cosine', 'linear']
    momentum_range: Sequence[Any] | None


class OptimizerGroupFields(TypedDict, total=False):
    """Weights with options of their own; a weight belongs to the first group that matches its name."""

    weights: str | Sequence[str]
    lr_factor: float
    schedule: Literal['constant', 'linear', 'cosine', 'polynomial', 'inverse-sqrt', 'wsd', 'one-cycle', 'plateau'] | ConstantScheduleFields | StepScheduleFields | MilestonesScheduleFields | ExponentialScheduleFields | LinearScheduleFields | CosineScheduleFields | PolynomialScheduleFields | CosineRestartsScheduleFields | InverseSqrtScheduleFields | WsdScheduleFields | OneCycleScheduleFields | PlateauScheduleFields | CallableScheduleFields | str | Callable[..., Any] | None
    weight_decay: float | None
    momentum: float | None
    nesterov: bool | None
    orthogonalize: bool | None
    beta_1: float | None
    beta_2: float | None
    rho: float | None
    epsilon: float | None
    amsgrad: bool | None
    centered: bool | None
    initial_accumulator_value: float | None


class PadFields(TypedDict, total=False):
    """Padding of the samples of each slice along their first axis."""

    pad: Mapping[str, float]
    to: Literal['longest'] | str | int


class PlateauScheduleFields(TypedDict, total=False):
    """Reduction on a plateau: the rate falls after an epoch or evaluation if a metric stops improving."""

    metric: str
    mode: Literal['min', 'max'] | None
    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    name: Literal['plateau']
    factor: float
    patience: int
    cooldown: int
    min_delta: float
    min_fraction: float


class PolynomialScheduleFields(TypedDict, total=False):
    """Polynomial decay: the learning rate follows a power of the remaining fraction of the run."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    final_fraction: float
    decay_steps: int | None
    name: Literal['polynomial']
    power: float


class ProfileFields(TypedDict, total=False):
    """Profiling of some steps by the framework's profiler."""

    first_step: int
    steps: int
    all_processes: bool


class RadamFields(TypedDict, total=False):
    """RAdam: Adam whose first steps are not adaptive, until the variance can be estimated."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    beta_1: float
    beta_2: float
    epsilon: float
    name: Literal['radam']


class RepeatedOrderFields(TypedDict, total=False):
    """Shuffled, each sample several times in its global batch, with random numbers of its own each."""

    name: Literal['repeated']
    times: int


class ReproducibleFields(TypedDict, total=False):
    """Results that are equal to the bit for any number of replicas."""

    granularity: int


class RmsPropFields(TypedDict, total=False):
    """RMSprop."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    name: Literal['rmsprop']
    rho: float
    momentum: float
    epsilon: float
    centered: bool


class ScalingFields(TypedDict, total=False):
    """Scaling of the learning rate with the global batch size; the spec's rate is for `base_batch_size`."""

    rule: Literal['none', 'linear', 'sqrt']
    base_batch_size: int | None


class SequentialOrderFields(TypedDict, total=False):
    """The order of the data set, in every epoch."""

    name: Literal['sequential']


class SgdFields(TypedDict, total=False):
    """Stochastic gradient descent."""

    lr: float
    weight_decay: float
    groups: Sequence[OptimizerGroupFields]
    layer_decay: LayerDecayFields | None
    name: Literal['sgd']
    momentum: float
    nesterov: bool


class SharesFields(TypedDict, total=False):
    """Shares of the replicas in each global batch, by their measured speed."""

    every: int


class ShuffledOrderFields(TypedDict, total=False):
    """A new permutation of all samples in every epoch."""

    name: Literal['shuffled']


class StepScheduleFields(TypedDict, total=False):
    """Step decay: the learning rate is multiplied by a factor at regular intervals of the run."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    every_epochs: int | None
    every_steps: int | None
    factor: float
    name: Literal['step']


class StrategyChoiceFields(TypedDict, total=False):
    """The strategy by which replicas cooperate."""

    name: str
    options: Mapping[str, Any]


class SwaFields(TypedDict, total=False):
    """Stochastic weight averaging: the equal-weight mean of the weights."""

    every: int
    start: int


class TimeoutsFields(TypedDict, total=False):
    """Timeouts in seconds, after which a process counts as lost."""

    silence: float
    start: float
    progress: float


class UpdateFields(TypedDict, total=False):
    """One of several updates of each batch: which weights change, by which objective and optimizer."""

    objective: str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]] | None
    loss: Any
    metrics: Any
    weights: str | Sequence[str]
    optimizer: Literal['adam', 'adamw', 'rmsprop', 'adagrad', 'lamb', 'lion', 'muon', 'nadam', 'radam'] | SgdFields | AdamFields | AdamWFields | RmsPropFields | AdagradFields | LambFields | LionFields | MuonFields | NadamFields | RadamFields | CustomOptimizerFields | None
    schedule: Literal['constant', 'linear', 'cosine', 'polynomial', 'inverse-sqrt', 'wsd', 'one-cycle', 'plateau'] | ConstantScheduleFields | StepScheduleFields | MilestonesScheduleFields | ExponentialScheduleFields | LinearScheduleFields | CosineScheduleFields | PolynomialScheduleFields | CosineRestartsScheduleFields | InverseSqrtScheduleFields | WsdScheduleFields | OneCycleScheduleFields | PlateauScheduleFields | CallableScheduleFields | str | Callable[..., Any] | None
    clip: ClipFields | None
    every: int
    from_epoch: int


class WeightedOrderFields(TypedDict, total=False):
    """Samples drawn with probabilities proportional to their weights."""

    name: Literal['weighted']
    weights: str
    samples: int | None
    replacement: bool


class WsdScheduleFields(TypedDict, total=False):
    """Warm-up, stable, decay: the learning rate stays at its peak until the decay at the end of the run."""

    warmup_steps: int | None
    warmup_epochs: int | None
    warmup_from_fraction: float
    name: Literal['wsd']
    decay_fraction: float
    decay_steps: int | None
    shape: Literal['linear', 'cosine', '1-sqrt']
    final_fraction: float


class SpecFields(TypedDict, total=False):
    """Training spec: what to train and how, equal under every backend."""

    name: str
    model: Any
    model_args: Mapping[str, Any]
    call: Literal['keywords'] | str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]] | None
    data: Any
    data_args: Mapping[str, Any]
    validation_split: float | None
    collate: PadFields | str | Callable[..., Any] | None
    transform: str | Callable[..., Any] | None
    initial_weights: Any
    loss: Any
    loss_weights: Mapping[str, float] | None
    class_weight: Mapping[str, float] | None
    objective: str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]] | None
    values: Mapping[str, float | LinearValueFields | str | Callable[..., Any]]
    frozen: Any
    metrics: Any
    metrics_over_all: Mapping[str, str | Callable[..., Any]]
    updates: Mapping[str, UpdateFields] | None
    optimizer: Literal['adam', 'adamw', 'rmsprop', 'adagrad', 'lamb', 'lion', 'muon', 'nadam', 'radam'] | SgdFields | AdamFields | AdamWFields | RmsPropFields | AdagradFields | LambFields | LionFields | MuonFields | NadamFields | RadamFields | CustomOptimizerFields
    schedule: Literal['constant', 'linear', 'cosine', 'polynomial', 'inverse-sqrt', 'wsd', 'one-cycle', 'plateau'] | ConstantScheduleFields | StepScheduleFields | MilestonesScheduleFields | ExponentialScheduleFields | LinearScheduleFields | CosineScheduleFields | PolynomialScheduleFields | CosineRestartsScheduleFields | InverseSqrtScheduleFields | WsdScheduleFields | OneCycleScheduleFields | PlateauScheduleFields | CallableScheduleFields | str | Callable[..., Any]
    scaling: Literal['none'] | ScalingFields
    gradients: str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]] | None
    clip: ClipFields | None
    gradient_norm: bool | Mapping[str, str | Sequence[str]] | None
    ema: float | EmaFields | None
    swa: SwaFields | None
    per_replica: str | Sequence[str] | None
    batch_norm: Literal['local', 'global', 'ghost']
    ghost_batches: int | None
    random_layers: Literal['per-replica', 'per-sample']
    global_batch_size: int | None
    local_batch_size: int | None
    epochs: int | None
    steps: int | None
    epoch_steps: int | None
    gradient_accumulation_steps: int
    reproducible: Literal['bits'] | ReproducibleFields | None
    shares: Literal['by-speed'] | SharesFields | None
    drop_outliers: float | None
    verify_every: int | None
    order: Literal['sequential', 'shuffled', 'balanced'] | SequentialOrderFields | ShuffledOrderFields | WeightedOrderFields | BalancedOrderFields | RepeatedOrderFields | ByLengthOrderFields | CallableOrderFields | str | Callable[..., Any] | None
    shuffle: bool
    drop_remainder: bool
    loader: LoaderOptionsFields
    seed: int
    precision: Literal['float32', 'float64', 'bfloat16', 'float16']
    loss_scale: LossScaleFields | None
    capture: bool
    recompute: str | Sequence[str] | None
    compile: bool
    evaluation: EvaluationFields
    checkpoint: CheckpointPolicyFields | None
    early_stopping: str | EarlyStoppingFields | None
    min_replicas: int | None
    elastic: ElasticFields | None
    device: Literal['auto', 'cpu', 'gpu']
    threads: int | None
    strategy: str | StrategyChoiceFields
    backend: str | None
    backend_options: Mapping[str, Mapping[str, Any]]
    plugins: Any
    loggers: str | LoggerChoiceFields | Sequence[str | LoggerChoiceFields]
    callbacks: Any
    profile: bool | ProfileFields | None
    on_nan: Literal['stop', 'warn', 'ignore', 'skip']
    timeouts: TimeoutsFields
    ignore: Sequence[str]
