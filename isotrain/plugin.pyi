"""The API for authors of plugins, and where it is defined."""

from isotrain.adapters import weight_files as weight_files
from isotrain.adapters.common import private_api as private_api
from isotrain.adapters.keras import backend as _keras_backend
from isotrain.adapters.keras import files as _keras_files
from isotrain.adapters.keras import layer_traits as _keras_layer_traits
from isotrain.adapters.keras import model as _keras_model
from isotrain.adapters.keras import private as _keras_private
from isotrain.core.contracts import events as events
from isotrain.core.contracts.backend.adapter import Adapter as Adapter
from isotrain.core.contracts.backend.adapter_protocols import RECORDED as RECORDED
from isotrain.core.contracts.backend.adapter_protocols import AbstractBackend as AbstractBackend
from isotrain.core.contracts.backend.adapter_protocols import (
    FullyShardedBackend as FullyShardedBackend,
)
from isotrain.core.contracts.backend.adapter_protocols import Message as Message
from isotrain.core.contracts.backend.adapter_protocols import (
    NamedUpdatesBackend as NamedUpdatesBackend,
)
from isotrain.core.contracts.backend.adapter_protocols import (
    ParameterServerBackend as ParameterServerBackend,
)
from isotrain.core.contracts.backend.adapter_protocols import PipelineBackend as PipelineBackend
from isotrain.core.contracts.backend.adapter_protocols import RecordingBackend as RecordingBackend
from isotrain.core.contracts.backend.adapter_protocols import (
    TensorParallelBackend as TensorParallelBackend,
)
from isotrain.core.contracts.backend.capabilities import (
    REPLICATED_CAPABILITIES as REPLICATED_CAPABILITIES,
)
from isotrain.core.contracts.backend.capabilities import Availability as Availability
from isotrain.core.contracts.backend.capabilities import Capabilities as Capabilities
from isotrain.core.contracts.backend.capabilities import Capability as Capability
from isotrain.core.contracts.backend.capabilities import Examination as Examination
from isotrain.core.contracts.backend.computations import average_gradients as average_gradients
from isotrain.core.contracts.backend.computations import average_state as average_state
from isotrain.core.contracts.backend.computations import flatten as flatten
from isotrain.core.contracts.backend.computations import slice_weights as slice_weights
from isotrain.core.contracts.backend.computations import unflatten as unflatten
from isotrain.core.contracts.backend.frozen_model import FrozenModel as FrozenModel
from isotrain.core.contracts.backend.group_hooks import LayerTrait as LayerTrait
from isotrain.core.contracts.backend.group_hooks import PassCosts as PassCosts
from isotrain.core.contracts.backend.group_hooks import Trait as Trait
from isotrain.core.contracts.backend.group_protocols import ActionTimingGroup as ActionTimingGroup
from isotrain.core.contracts.backend.group_protocols import CompressingGroup as CompressingGroup
from isotrain.core.contracts.backend.group_protocols import CompressionMethod as CompressionMethod
from isotrain.core.contracts.backend.group_protocols import (
    DelayedUpdatesGroup as DelayedUpdatesGroup,
)
from isotrain.core.contracts.backend.group_protocols import ExportingGroup as ExportingGroup
from isotrain.core.contracts.backend.group_protocols import FreezingGroup as FreezingGroup
from isotrain.core.contracts.backend.group_protocols import FullyShardedGroup as FullyShardedGroup
from isotrain.core.contracts.backend.group_protocols import (
    GradientKeepingGroup as GradientKeepingGroup,
)
from isotrain.core.contracts.backend.group_protocols import GradientNormGroup as GradientNormGroup
from isotrain.core.contracts.backend.group_protocols import OrderedSumsGroup as OrderedSumsGroup
from isotrain.core.contracts.backend.group_protocols import (
    ParameterServerGroup as ParameterServerGroup,
)
from isotrain.core.contracts.backend.group_protocols import PipelineGroup as PipelineGroup
from isotrain.core.contracts.backend.group_protocols import ProfilingGroup as ProfilingGroup
from isotrain.core.contracts.backend.group_protocols import Reduction as Reduction
from isotrain.core.contracts.backend.group_protocols import ShardedGroup as ShardedGroup
from isotrain.core.contracts.backend.group_protocols import WeightsFileGroup as WeightsFileGroup
from isotrain.core.contracts.backend.group_protocols import WorkerGroup as WorkerGroup
from isotrain.core.contracts.backend.protocol_checks import require as require
from isotrain.core.contracts.backend.replica import Computation as Computation
from isotrain.core.contracts.backend.replica import ReduceOp as ReduceOp
from isotrain.core.contracts.backend.replica import Replica as Replica
from isotrain.core.contracts.backend.replica import ShardedReplica as ShardedReplica
from isotrain.core.contracts.backend.replica import StatePart as StatePart
from isotrain.core.contracts.backend.replica import Subgroups as Subgroups
from isotrain.core.contracts.backend.replica import Tensor as Tensor
from isotrain.core.contracts.backend.replica import TensorFunctions as TensorFunctions
from isotrain.core.contracts.backend.replica import index_within as index_within
from isotrain.core.contracts.backend.replica import local_subgroup as local_subgroup
from isotrain.core.contracts.backend.replica import spans_of_range as spans_of_range
from isotrain.core.contracts.backend.replica_group import AVERAGED as AVERAGED
from isotrain.core.contracts.backend.replica_group import Phase as Phase
from isotrain.core.contracts.backend.replica_group import ReplicaGroup as ReplicaGroup
from isotrain.core.contracts.backend.sample_draws import SampleDraws as SampleDraws
from isotrain.core.contracts.backend.sample_draws import active_draws as active_draws
from isotrain.core.contracts.backend.sample_draws import draw_by as draw_by
from isotrain.core.contracts.backend.step_context import StepContext as StepContext
from isotrain.core.contracts.backend.step_context import WeightedLosses as WeightedLosses
from isotrain.core.contracts.backend.step_context import takes_step as takes_step
from isotrain.core.contracts.cluster_environment import ClusterEnvironment as ClusterEnvironment
from isotrain.core.contracts.cluster_environment import ClusterInfo as ClusterInfo
from isotrain.core.contracts.cluster_environment import EnvReader as EnvReader
from isotrain.core.contracts.device_mesh import DATA as DATA
from isotrain.core.contracts.device_mesh import SHARD as SHARD
from isotrain.core.contracts.device_mesh import STAGE as STAGE
from isotrain.core.contracts.device_mesh import TENSOR as TENSOR
from isotrain.core.contracts.device_mesh import DeviceMesh as DeviceMesh
from isotrain.core.contracts.job import Job as Job
from isotrain.core.contracts.job import Work as Work
from isotrain.core.contracts.launcher import Allocation as Allocation
from isotrain.core.contracts.launcher import HostSlots as HostSlots
from isotrain.core.contracts.launcher import Launcher as Launcher
from isotrain.core.contracts.launcher import RankCommand as RankCommand
from isotrain.core.contracts.launcher import Submission as Submission
from isotrain.core.contracts.logger import Logger as Logger
from isotrain.core.contracts.parallel_layout import REPLICATED as REPLICATED
from isotrain.core.contracts.parallel_layout import ParallelLayout as ParallelLayout
from isotrain.core.contracts.plan import BackendConfig as BackendConfig
from isotrain.core.contracts.plan import DeviceKind as DeviceKind
from isotrain.core.contracts.plan import Hosts as Hosts
from isotrain.core.contracts.plan import Plan as Plan
from isotrain.core.contracts.plan import StartMethod as StartMethod
from isotrain.core.contracts.plan import hosts_of_size as hosts_of_size
from isotrain.core.contracts.process import ProcessContext as ProcessContext
from isotrain.core.contracts.process import ProcessInfo as ProcessInfo
from isotrain.core.contracts.process import Role as Role
from isotrain.core.contracts.process import ServerConnection as ServerConnection
from isotrain.core.contracts.program_recorder import ProgramRecorder as ProgramRecorder
from isotrain.core.contracts.state import ALL_STATE as ALL_STATE
from isotrain.core.contracts.state import MODEL_STATE as MODEL_STATE
from isotrain.core.contracts.state import ExportForm as ExportForm
from isotrain.core.contracts.state import ModelBytes as ModelBytes
from isotrain.core.contracts.state import OptimizerStateNames as OptimizerStateNames
from isotrain.core.contracts.state import StateBytes as StateBytes
from isotrain.core.contracts.state import StateInfo as StateInfo
from isotrain.core.contracts.state import StateKind as StateKind
from isotrain.core.contracts.strategy import Invariant as Invariant
from isotrain.core.contracts.strategy import Strategy as Strategy
from isotrain.core.contracts.strategy import StrategyState as StrategyState
from isotrain.core.data.batch import Batch as Batch
from isotrain.core.data.batch import Slice as Slice
from isotrain.core.data.pytree import Weighted as Weighted
from isotrain.core.data.pytree import map_tree as map_tree
from isotrain.core.data.pytree import unweighted as unweighted
from isotrain.core.data.sampler import slice_bounds as slice_bounds
from isotrain.core.errors import BackendUnavailableError as BackendUnavailableError
from isotrain.core.errors import ClusterInfoError as ClusterInfoError
from isotrain.core.errors import DataError as DataError
from isotrain.core.errors import IsotrainError as IsotrainError
from isotrain.core.errors import PeerLostError as PeerLostError
from isotrain.core.errors import PlanError as PlanError
from isotrain.core.errors import PluginError as PluginError
from isotrain.core.errors import RunFailedError as RunFailedError
from isotrain.core.errors import SpecError as SpecError
from isotrain.core.errors import UnsupportedError as UnsupportedError
from isotrain.core.errors import unknown_name as unknown_name
from isotrain.core.launching.scheduler.scheduler_launcher import (
    SchedulerLauncher as SchedulerLauncher,
)
from isotrain.core.parameter_server.coordinator import CoordinatorGroup as CoordinatorGroup
from isotrain.core.parameter_server.coordinator import (
    recorded_coordinator_group as recorded_coordinator_group,
)
from isotrain.core.parameter_server.layout import (
    PARAMETER_SERVER_CAPABILITIES as PARAMETER_SERVER_CAPABILITIES,
)
from isotrain.core.parameter_server.layout import ParameterServerLayout as ParameterServerLayout
from isotrain.core.parameter_server.layout import TcpParameterServer as TcpParameterServer
from isotrain.core.parameter_server.work_queue import WorkItem as WorkItem
from isotrain.core.parameter_server.worker_pool import WorkerLiveness as WorkerLiveness
from isotrain.core.parameter_server.worker_pool import WorkerPool as WorkerPool
from isotrain.core.parameter_server.worker_pool import WorkResult as WorkResult
from isotrain.core.pipeline.action_timer import EXPOSED_EXCHANGE as EXPOSED_EXCHANGE
from isotrain.core.pipeline.action_timer import ActionTimer as ActionTimer
from isotrain.core.pipeline.actions import Action as Action
from isotrain.core.pipeline.actions import Transfer as Transfer
from isotrain.core.pipeline.actions import idle_share as idle_share
from isotrain.core.pipeline.actions import stage_actions as stage_actions
from isotrain.core.pipeline.actions import time_line as time_line
from isotrain.core.pipeline.delayed_updates import DELAYED_SCHEDULES as DELAYED_SCHEDULES
from isotrain.core.pipeline.delayed_updates import DelayedUpdates as DelayedUpdates
from isotrain.core.pipeline.delayed_updates import StageVersions as StageVersions
from isotrain.core.pipeline.delayed_updates import delayed_updates as delayed_updates
from isotrain.core.pipeline.delayed_updates import stage_versions as stage_versions
from isotrain.core.pipeline.delayed_updates import step_orders as step_orders
from isotrain.core.pipeline.executor import ExecutedAction as ExecutedAction
from isotrain.core.pipeline.executor import StageWork as StageWork
from isotrain.core.pipeline.executor import execute_stage as execute_stage
from isotrain.core.pipeline.partition import Partitioner as Partitioner
from isotrain.core.pipeline.partition import PipelineSplit as PipelineSplit
from isotrain.core.pipeline.pipeline_plan import PipelinePlan as PipelinePlan
from isotrain.core.pipeline.pipeline_plan import pipeline_plan as pipeline_plan
from isotrain.core.pipeline.profile import LayerCost as LayerCost
from isotrain.core.pipeline.profile import ModelProfile as ModelProfile
from isotrain.core.pipeline.schedules import Order as Order
from isotrain.core.pipeline.schedules import Pass as Pass
from isotrain.core.pipeline.schedules import PipelineShape as PipelineShape
from isotrain.core.pipeline.schedules import pipeline_bubble as pipeline_bubble
from isotrain.core.pipeline.schedules import stage_orders as stage_orders
from isotrain.core.plugins.hookspecs import API_VERSION as API_VERSION
from isotrain.core.plugins.hookspecs import hookimpl as hookimpl
from isotrain.core.plugins.registries import BackendRegistry as BackendRegistry
from isotrain.core.plugins.registries import CallbackRegistry as CallbackRegistry
from isotrain.core.plugins.registries import EnvironmentRegistry as EnvironmentRegistry
from isotrain.core.plugins.registries import LauncherRegistry as LauncherRegistry
from isotrain.core.plugins.registries import LoggerRegistry as LoggerRegistry
from isotrain.core.plugins.registries import ModelRegistry as ModelRegistry
from isotrain.core.plugins.registries import StrategyRegistry as StrategyRegistry
from isotrain.core.sharding.layouts import FullyShardedLayout as FullyShardedLayout
from isotrain.core.sharding.layouts import Hybrid as Hybrid
from isotrain.core.sharding.layouts import ShardedLayout as ShardedLayout
from isotrain.core.sharding.layouts import sharded_group as sharded_group
from isotrain.core.sharding.shard_assignment import Bucket as Bucket
from isotrain.core.sharding.shard_assignment import ShardAssignment as ShardAssignment
from isotrain.core.sharding.shard_assignment import assign_shards as assign_shards
from isotrain.core.spec import import_strings as import_strings
from isotrain.core.spec.field_types import ArgumentOrder as ArgumentOrder
from isotrain.core.spec.field_types import Component as Component
from isotrain.core.spec.optimizer_groups import WeightGroup as WeightGroup
from isotrain.core.spec.optimizer_groups import weight_groups as weight_groups
from isotrain.core.spec.optimizers import CustomOptimizer as CustomOptimizer
from isotrain.core.spec.sections import LossScale as LossScale
from isotrain.core.spec.training_spec import TrainingSpec as TrainingSpec
from isotrain.core.system.hardware import visible_gpus as visible_gpus
from isotrain.core.system.hostlist import counts_per_host as counts_per_host
from isotrain.core.system.hostlist import host_list as host_list
from isotrain.core.system.process import environ_set as environ_set
from isotrain.core.transport.connection import ConnectionLostError as ConnectionLostError
from isotrain.core.transport.connection import connect as connect

keras_backend = _keras_backend
keras_files = _keras_files
keras_layer_traits = _keras_layer_traits
keras_model = _keras_model
keras_private = _keras_private
