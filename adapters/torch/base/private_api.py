"""All undocumented APIs of torch that isotrain uses, each with a probe that it works as expected."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import autograd, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from isotrain.adapters.common.private_api import PrivateApiProbe, require

assert_async = torch._assert_async
ASSERTIONS = {torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg}
"""Operations of `assert_async` in a graph: they have no result, and must stay."""
BatchNormBase = _BatchNorm
binary_cross_entropy = torch._C._nn.binary_cross_entropy
cross_entropy_loss = torch._C._nn.cross_entropy_loss
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_clamp_max = torch._foreach_clamp_max
foreach_clamp_min = torch._foreach_clamp_min
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sqrt_ = torch._foreach_sqrt_
foreach_sub_ = torch._foreach_sub_
fused_adam_ = torch._fused_adam_

VALUE_READ_ERROR = "get value out of a tracing tensor"
"""Part of the error when Python reads a value of a tensor that `traced` traces."""


_FOREACH_CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add, a number": (lambda a, b, c: foreach_add(a, 0.5), lambda a, b, c: a + 0.5),
    "add_, a number": (lambda a, b, c: foreach_add_(a, 0.5), lambda a, b, c: a + 0.5),
    "add_": (lambda a, b, c: foreach_add_(a, b), lambda a, b, c: a + b),
    "add, alpha": (lambda a, b, c: foreach_add(a, b, alpha=-0.5), lambda a, b, c: a - b / 2),
    "add_, alpha": (lambda a, b, c: foreach_add_(a, b, alpha=-0.5), lambda a, b, c: a - b / 2),
    "addcdiv_": (lambda a, b, c: foreach_addcdiv_(a, b, c, -0.5), lambda a, b, c: a - b / c / 2),
    "addcmul_": (lambda a, b, c: foreach_addcmul_(a, b, c, -0.5), lambda a, b, c: a - b * c / 2),
    "clamp_max": (lambda a, b, c: foreach_clamp_max(a, 2.0), lambda a, b, c: a.clamp(max=2.0)),
    "clamp_min": (lambda a, b, c: foreach_clamp_min(a, 2.0), lambda a, b, c: a.clamp(min=2.0)),
    "copy_": (lambda a, b, c: foreach_copy_(a, b), lambda a, b, c: b),
    "div, a number": (lambda a, b, c: foreach_div(a, 2.0), lambda a, b, c: a / 2),
    "div": (lambda a, b, c: foreach_div(a, b), lambda a, b, c: a / b),
    "div_, a scalar": (lambda a, b, c: foreach_div_(a, b[0][0]), lambda a, b, c: a / 4),
    "lerp_": (lambda a, b, c: foreach_lerp_(a, b, 0.25), lambda a, b, c: a + (b - a) / 4),
    "mul, a scalar": (lambda a, b, c: foreach_mul(a, b[0][0]), lambda a, b, c: a * 4),
    "mul, scalars": (lambda a, b, c: foreach_mul(a, [b[0][0]] * 2), lambda a, b, c: a * 4),
    "mul_, a number": (lambda a, b, c: foreach_mul_(a, 0.5), lambda a, b, c: a / 2),
    "norm": (lambda a, b, c: foreach_norm(a), lambda a, b, c: torch.linalg.vector_norm(a)),
    "sqrt_": (lambda a, b, c: foreach_sqrt_(a), lambda a, b, c: a.sqrt()),
    "sub_": (lambda a, b, c: foreach_sub_(a, b), lambda a, b, c: a - b),
}
"""Foreach calls on three lists, by name, each with the same operation on one tensor of each list."""


def _probe_foreach() -> None:
    for name, (on_lists, on_each) in _FOREACH_CASES.items():
        rows = [[1.0, 4.0], [4.0, 2.0], [2.0, 8.0]]
        lists = [[torch.tensor(row), torch.tensor(row[:1])] for row in rows]
        expected = [on_each(*each) for each in zip(*lists, strict=True)]
        results = on_lists(*lists)
        if name.partition(",")[0].endswith("_"):
            results = lists[0]
        pairs = zip(results, expected, strict=True)
        require(all(torch.allclose(*pair) for pair in pairs), f"_foreach_{name}, as for each")


def _probe_fused_adam() -> None:
    weight, gradient = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.5])
    first, second = torch.zeros(2), torch.zeros(2)
    fused_adam_(
        *([weight], [gradient], [first], [second], [], [torch.tensor(1.0)]),
        lr=0.25,
        beta1=0.5,
        beta2=0.5,
        weight_decay=0.0,
        eps=0.0,
        amsgrad=False,
        maximize=False,
    )
    require(torch.allclose(first, gradient / 2), "the mean of gradients in the third argument")
    require(torch.allclose(second, gradient**2 / 2), "that of their squares in the fourth")
    require(torch.allclose(weight, torch.tensor([0.75, 2.25])), "a step of Adam")


def _probe_cross_entropy() -> None:
    scores, classes = torch.eye(3), torch.tensor([0, 2, 1])
    weights = torch.tensor([1.0, 2.0, 4.0])
    operation = torch.ops.aten.cross_entropy_loss.default
    for options in ((weights, 0), (weights, 1, 2), (None, 2, -100, 0.25)):
        is_same = torch.equal(
            cross_entropy_loss(scores, classes, *options), operation(scores, classes, *options)
        )
        require(is_same, "weights, reduction, ignored class and smoothing, in this order")


def _probe_binary_cross_entropy() -> None:
    probabilities, targets = torch.tensor([0.25, 0.5]), torch.tensor([0.0, 1.0])
    operation = torch.ops.aten.binary_cross_entropy.default
    for options in ((None, 0), (torch.tensor([1.0, 2.0]), 1), (None, 2)):
        arguments = (probabilities, targets, *options)
        is_same = torch.equal(binary_cross_entropy(*arguments), operation(*arguments))
        require(is_same, "weights and reduction, in this order")


def _probe_assert_async() -> None:
    assert_async(torch.tensor(True), "not said")
    message = ""
    try:
        assert_async(torch.tensor(False), "what was expected")
    except RuntimeError as error:
        message = str(error)
    require("what was expected" in message, "an error with the message where it does not hold")
    graph = traced(lambda x: (assert_async(x.all(), "said"), x + 1)[1], torch.ones(2)).graph
    targets = [node.target for node in graph.nodes]
    require(not ASSERTIONS.isdisjoint(targets), "an operation of a traced graph")


def has_listeners(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks (of the optimizer or of all optimizers) or a profiler watch an optimizer's steps."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or autograd.profiler._is_profiler_enabled
    )


def _probe_listeners() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    require(not has_listeners(optimizer), "no listener of a new optimizer")
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *args: None)
        try:
            require(has_listeners(optimizer), f"the hook that {register.__name__} registers")
        finally:
            handle.remove()
    require(not has_listeners(optimizer), "no listener that was removed")
    require(autograd.profiler._is_profiler_enabled is False, "a flag, False while no profiler runs")


UNREDUCED_ERROR = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
"""Part of DDP's error for parameters without gradients: their indices."""
TOO_FEW_VALUES_ERROR = "Expected more than 1 value per channel when training"
"""Part of the error of a batch normalisation with one value per channel."""


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch normalisation, of any rank."""
    return isinstance(module, BatchNormBase)


def check_dimensions(module: nn.Module, inputs: torch.Tensor) -> None:
    """Raises `ValueError` where inputs do not have the dimensions that a batch normalisation takes."""
    module._check_input_dim(inputs)


def is_dropout(module: nn.Module) -> bool:
    """Whether a module is a dropout of any kind, with a rate above 0."""
    return isinstance(module, _DropoutNd) and module.p > 0


def _probe_module_classes() -> None:
    normalizing = (nn.BatchNorm1d(1), nn.BatchNorm3d(1), nn.SyncBatchNorm(1), nn.LazyBatchNorm2d())
    dropping = (nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5))
    require(all(map(is_batch_norm, normalizing)), "every batch normalisation is a _BatchNorm")
    require(all(map(is_dropout, dropping)), "every dropout is a _DropoutNd, its rate in `p`")
    check_dimensions(nn.BatchNorm1d(1), torch.zeros(2, 1))
    others = (*dropping, nn.LayerNorm(1), nn.Dropout(0.0))
    require(not any(map(is_batch_norm, others)), "nothing else is a _BatchNorm")
    require(
        not any(map(is_dropout, (*normalizing, nn.Dropout(0.0)))), "nothing else is a _DropoutNd"
    )


def _probe_batch_norm_error() -> None:
    try:
        nn.BatchNorm1d(1)(torch.zeros(1, 1))
    except ValueError as error:
        require(TOO_FEW_VALUES_ERROR in str(error), "its message for a single value per channel")
    else:
        require(False, "an error for a single value per channel")


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module that `torch.compile` has wrapped, whose calls are now compiled; None for other modules."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # else nothing was compiled
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return None
    original: nn.Module = module._orig_mod

    def call(*args: Any, **options: Any) -> Any:  # torch compiles no calls of its own classes
        return original._call_impl(*args, **options)

    original._compiled_call_impl = module.dynamo_ctx(call)
    return original


def _probe_compiled_module() -> None:
    linear, calls = nn.Sequential(nn.Linear(1, 1)), []

    def backend(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        calls.append(graph)
        return graph.forward

    require(compiled_module(torch.compile(linear, backend=backend)) is linear, "the module itself")
    linear(torch.ones(1, 1))
    require(len(calls) == 1, "a compiled call of the module")
    require(compiled_module(linear) is None, "no wrapper around other modules")


def compile_in_this_process() -> None:
    """Keeps torch's compiler from starting processes of its own, which would outlive the run."""
    from torch._inductor import config

    config.compile_threads = 1


def _probe_compile_threads() -> None:
    from torch._inductor import config

    before = config.compile_threads
    require(isinstance(before, int), "a number of threads to compile with")
    try:
        compile_in_this_process()
        require(config.compile_threads == 1, "a setting that takes effect")
    finally:
        config.compile_threads = before


class _EmptyFakeMode(TorchFunctionMode):
    """Replacement for `FakeTensorMode` in `make_fx`, where that takes a third of the time.

    Its tensors have dtype and device alone; shape and strides are in `tensor_meta`.
    """

    shape_env = None
    """Attribute that torch reads: no shape is symbolic."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty_strided:
            return torch.empty(0, dtype=kwargs["dtype"], device=kwargs["device"])
        return func(*args, **kwargs)


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    """Traces a function of tensors (any shape) into an fx graph of aten operations, before dispatch."""
    from torch._guards import TracingContext, tracing
    from torch.fx.experimental.proxy_tensor import make_fx

    with tracing(TracingContext(_EmptyFakeMode())):
        return make_fx(function, pre_dispatch=True)(*inputs)


def is_tracing() -> bool:
    """Whether `traced` is tracing."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def node_of(tensor: torch.Tensor) -> Node | None:
    """Graph node of a tensor of any shape, while `traced` is tracing; None if it has none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _probe_tracing() -> None:
    constant = torch.ones(1, 2)
    seen: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.extend([is_tracing(), node_of(x), node_of(constant)])
        return nn.functional.linear(x, constant).relu()

    graph = traced(function, torch.ones(3, 2)).graph
    tracing, node, none = seen
    require(tracing and not is_tracing(), "a mode while make_fx traces")
    require(
        node.op == "placeholder" and none is None, "a node for an input, and none for a constant"
    )
    calls = [each for each in graph.nodes if each.op == "call_function"]
    expected = [torch.ops.aten.linear.default, torch.ops.aten.relu.default]
    require([each.target for each in calls] == expected, "operations as they are called")
    kinds = {(each.meta["val"].dtype, each.meta["val"].device.type) for each in calls}
    require(kinds == {(torch.float32, "cpu")}, "the dtype and the device of results in `val`")
    shapes = [tuple(each.meta["tensor_meta"].shape) for each in calls]
    require(shapes == [(3, 1)] * 2, "the shapes of results in `tensor_meta`")


@functools.cache
def fake_tensors() -> Any:
    """Context in which tensors have shapes and no values, and `from_tensor` makes one of a tensor.

    It is one for the process, since torch does not mix tensors of several.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # else the mode refers to parameters, which `nn.Module.to` then refuses to change
    mode.fake_tensor_converter.set_tensor_memo = lambda tensor, fake: None
    return mode


def is_fake(tensor: object) -> bool:
    """Whether it is a tensor, of any shape, that has no values."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):  # the import takes microseconds
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def is_in_fake_tensors() -> bool:
    """Whether a context of the kind of `fake_tensors` is entered, by whomever."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor, of any shape, that computes by others which it holds, as a DTensor does."""
    return is_traceable_wrapper_subclass(tensor)


def missing_value_errors() -> tuple[type[Exception], ...]:
    """Errors of operations that read a tensor without values, or that take no such tensor."""
    from torch._subclasses import fake_tensor

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
    )


def changes_memory(function: Any) -> bool:
    """Whether an operator gives the tensor that it writes other memory or another shape, as `set_` does."""
    return torch.Tag.inplace_view in getattr(function, "tags", ())


def ddp_buckets(weights: Sequence[torch.Tensor], limits: Sequence[int]) -> list[list[torch.Tensor]]:
    """Buckets that DistributedDataParallel makes of gradients.

    Args:
        weights: Weights, any shapes, in the order of their gradients.
        limits: Sizes in bytes at which the first bucket, the second and so on are closed; the last one
            holds for all others.
    """
    found, _ = torch.distributed._compute_bucket_assignment_by_size(list(weights), list(limits))
    return [[weights[index] for index in indices] for indices in found]


def _probe_ddp_buckets() -> None:
    weights = [torch.zeros(size) for size in (1, 3, 1, 1, 4)]
    sizes = [list(map(len, bucket)) for bucket in ddp_buckets(weights, [4, 8])]
    require(sizes == [[1], [3], [1, 1], [4]], "buckets that are closed at their limits")


def process_group_name(group: torch.distributed.ProcessGroup) -> str:
    """Name under which torch keeps a process group; only in use with `RecordedGroup`."""
    return str(torch.distributed.distributed_c10d._world.pg_names[group])


def process_group_of(group: Any) -> torch.distributed.ProcessGroup:
    """The process group that a collective operation gets, as itself or by its name."""
    if not isinstance(group, str):
        return group
    return torch.distributed.distributed_c10d._resolve_process_group(group)


def collective_name(operation: Any) -> str | None:
    """Name of an operation that communicates, as those of DTensors do; None if it does not."""
    schema = schema_of(operation)
    if schema is None:
        return None
    namespace, _, name = schema.name.partition("::")
    is_distributed = namespace in ("_c10d_functional", "_dtensor")
    communicates = is_distributed and name not in ("wait_tensor", "_wrap_tensor_autograd")
    return name if communicates else None


def _probe_collective_name() -> None:
    operations = torch.ops._c10d_functional
    found = [
        collective_name(each.default)
        for each in (
            *(operations.all_reduce, operations.all_gather_into_tensor),
            *(operations.reduce_scatter_tensor, operations.wait_tensor, torch.ops.aten.neg),
        )
    ]
    names = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"]
    require(found == [*names, None, None], "names of the collectives of DTensors")
    weight = torch.ones(2)
    require(not any(map(is_wrapper, (weight, nn.Parameter(weight)))), "tensors that hold no others")


def _raised(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise RuntimeError("expected: an error")


def _probe_missing_values() -> None:
    with fake_tensors():
        fake, images, kernel = torch.ones(2, 3), torch.ones(1, 3, 8, 8), torch.ones(2, 4, 3, 3)
    for call in (fake.sum().item, fake.nonzero):
        require(isinstance(_raised(call), missing_value_errors()), "errors of missing values")
    for call in (lambda: fake.view(5), lambda: nn.functional.conv2d(images, kernel)):
        require(not isinstance(_raised(call), missing_value_errors()), "other errors of shapes")
    aten = torch.ops.aten
    require(
        changes_memory(aten.set_.source_Tensor) and not changes_memory(aten.add_.Tensor),
        "a tag of operators that change a tensor's memory",
    )


def _probe_fake_tensors() -> None:
    weight = torch.ones(2, 3)
    require(not is_in_fake_tensors(), "no context before it is entered")
    with fake_tensors() as mode:
        require(is_in_fake_tensors(), "a context that is known to be entered")
        fake = mode.from_tensor(weight)
        require(mode.from_tensor(weight) is fake, "one fake tensor for a tensor")
        product = fake @ torch.ones(3, 5)
        linear = nn.Linear(3, 2)
    require(is_fake(product) and not is_fake(weight), "a type of their own")
    require(linear.double().weight.dtype == torch.float64, "modules whose dtype can be changed")
    require(product.shape == (2, 5), "shapes of results")
    require(product.untyped_storage().nbytes() == product.nbytes, "sizes of their storage")


def _probe_value_read_error() -> None:
    message = ""
    try:
        traced(lambda x: x * float(x.sum()), torch.ones(2))
    except RuntimeError as error:
        message = str(error)
    require(VALUE_READ_ERROR in message, f"an error of make_fx with {VALUE_READ_ERROR!r}")


def is_in_vmap() -> bool:
    """Whether `torch.vmap` or another transform calls a function, whose operations `traced` misses."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _probe_vmap() -> None:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_in_vmap())
        return x * 2

    torch.vmap(function)(torch.ones(2))
    traced(function, torch.ones(2))
    require(seen[0] and not any(seen[1:]), "an interpreter on the stack within torch.vmap alone")


def schema_of(operation: Any) -> Any:
    """Schema of an operation (arguments, results, aliases); None if it is not torch's."""
    return getattr(operation, "_schema", None)


def written_arguments(
    operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]
) -> list[Any]:
    """Arguments of an operation, tensors of any shape or lists of them, that it changes in place."""
    schema = schema_of(operation)
    if schema is None or not schema.is_mutable:
        return []
    changed = [
        each.alias_info is not None and each.alias_info.is_write for each in schema.arguments
    ]
    names = [each.name for each in schema.arguments]
    by_name = {**dict(zip(names, arguments, strict=False)), **options}
    return [by_name[name] for name in itertools.compress(names, changed) if name in by_name]


def _probe_schema() -> None:
    aten = torch.ops.aten
    add, adds, view = map(schema_of, (aten.add.Tensor, aten.add_.Tensor, aten.view.default))
    require(not add.is_mutable and adds.is_mutable, "`is_mutable` if an argument is changed")
    aliasing = [any(arg.alias_info for arg in each.arguments) for each in (add, adds, view)]
    require(aliasing == [False, True, True], "`alias_info` of arguments that are changed or viewed")
    require(schema_of(len) is None, "no schema of other functions")
    written = [
        written_arguments(aten.add_.Tensor, [1, 2], {}),
        written_arguments(aten.add.out, [1, 2], {"out": 3}),
        written_arguments(aten._foreach_add_.List, [[1], [2]], {}),
        written_arguments(aten.add.Tensor, [1, 2], {})
        + written_arguments(aten.view.default, [1, 2], {}),
    ]
    require(written == [[1], [3], [[1]], []], "`is_write` of arguments that are changed")


def version_of(tensor: torch.Tensor) -> int:
    """Version counter of a tensor of any shape: the number of in-place changes."""
    return tensor._version


def _probe_version() -> None:
    tensor = torch.zeros(2)
    before = version_of(tensor)
    tensor.sum()
    require(version_of(tensor) == before, "no change by an operation that only reads")
    tensor[0] = 1.0
    tensor.add_(1.0)
    require(version_of(tensor) == before + 2, "a change by each operation that writes")


def preserving_versions(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    """Context in which in-place changes of tensors, of any shapes, do not count in `version_of`."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def _probe_preserving_versions() -> None:
    weight = torch.ones(2, requires_grad=True)
    other = weight.detach().clone()
    product = (weight * weight).sum()
    before, data = version_of(weight), weight.data
    weight.data = other
    with torch.no_grad(), preserving_versions([weight]):
        weight.add_(1.0)
    require(version_of(weight) == before, "no change, also by new data")
    require(torch.equal(other, torch.full((2,), 2.0)), "an update in place of the new data")
    weight.data = data
    product.backward()
    require(torch.equal(weight.grad, torch.full((2,), 2.0)), "gradients for the old data")


def storage_of(tensor: torch.Tensor) -> Hashable:
    """Key of the storage of a tensor of any shape, equal for tensors that share memory.

    It is unique as long as it is kept.
    """
    return StorageWeakRef(tensor.untyped_storage())


def _probe_storage() -> None:
    tensor = torch.zeros(4)
    key = storage_of(tensor)
    require(key == storage_of(tensor.view(2, 2).t()), "the same key for a view")
    require(hash(key) == hash(storage_of(tensor[2:])), "the same key for a part")
    others = []
    for _ in range(8):
        tensor = torch.zeros(4)  # may reuse the memory of the first
        others.append(storage_of(tensor))
    require(key not in others, "another key for other memory, even after the first is freed")


T = TypeVar("T", bound=torch.Tensor)


def without_memory(kind: type[T], dtype: torch.dtype, device: torch.device) -> T:
    """Scalar tensor of a class with `__torch_dispatch__`, to which torch turns for its value."""
    scalar: T = torch.Tensor._make_wrapper_subclass(kind, (), dtype=dtype, device=device)
    return scalar


class _Three(torch.Tensor):
    """Scalar of value 3, which it says to operations alone."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        plain = [torch.tensor(3.0) if isinstance(each, _Three) else each for each in args]
        return func(*plain, **(kwargs or {}))


def _probe_without_memory() -> None:
    three = without_memory(_Three, torch.float32, torch.device("cpu"))
    require((three.shape, three.dtype) == ((), torch.float32), "shape and dtype of a scalar")
    read = [torch.full((), three), torch.zeros(()).add(1, alpha=three)]
    require([float(each) for each in read] == [3.0] * 2, "the value that the class gives")


PROBES = (
    PrivateApiProbe("_assert_async", _probe_assert_async),
    PrivateApiProbe("_C._nn.binary_cross_entropy", _probe_binary_cross_entropy),
    PrivateApiProbe("_C._nn.cross_entropy_loss", _probe_cross_entropy),
    PrivateApiProbe("_foreach_*", _probe_foreach),
    PrivateApiProbe("_fused_adam_", _probe_fused_adam),
    PrivateApiProbe("_optimizer_step_pre_hooks and other listeners", _probe_listeners),
    PrivateApiProbe(
        "nn.modules.batchnorm._BatchNorm and dropout._DropoutNd", _probe_module_classes
    ),
    PrivateApiProbe("nn.BatchNorm1d's error", _probe_batch_norm_error),
    PrivateApiProbe("_inductor.config.compile_threads", _probe_compile_threads),
    PrivateApiProbe("_dynamo.eval_frame.OptimizedModule", _probe_compiled_module),
    PrivateApiProbe("fx.experimental.proxy_tensor and _guards", _probe_tracing),
    PrivateApiProbe("_subclasses.fake_tensor.FakeTensorMode", _probe_fake_tensors),
    PrivateApiProbe("_subclasses.fake_tensor's errors", _probe_missing_values),
    PrivateApiProbe("distributed._compute_bucket_assignment_by_size", _probe_ddp_buckets),
    PrivateApiProbe("ops._c10d_functional", _probe_collective_name),
    PrivateApiProbe("fx.experimental.proxy_tensor's error", _probe_value_read_error),
    PrivateApiProbe("_C._functorch.peek_interpreter_stack", _probe_vmap),
    PrivateApiProbe("OpOverload._schema", _probe_schema),
    PrivateApiProbe("Tensor._version", _probe_version),
    PrivateApiProbe(
        "autograd.grad_mode._unsafe_preserve_version_counter", _probe_preserving_versions
    ),
    PrivateApiProbe("multiprocessing.reductions.StorageWeakRef", _probe_storage),
    PrivateApiProbe("Tensor._make_wrapper_subclass", _probe_without_memory),
)
