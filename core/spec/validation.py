"""Validation of the training spec: a pydantic model that reports all problems in one SpecError."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import InitErrorDetails, PydanticCustomError

from isotrain.core.errors import SpecError, nearest, whether_meant
from isotrain.core.quantities import counted
from isotrain.core.spec.import_strings import describe

BRANCH = "\x1f"  # prefix of the label of a union's branch, which is left out of messages
_KIND = "isotrain"
_ABSENT = object()
_KIND_TEXTS = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}
_ERRORS = {"model_type": "a table", "dict_type": "a table", "string_type": "text"}
OTHER_TOOLS_NAMES = {
    "16-mixed": "float16",
    "32-true": "float32",
    "64-true": "float64",
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "activation_checkpointing": "recompute",
    "batch_size": "global_batch_size",
    "bf16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "checkpointing": "checkpoint",
    "constant_with_warmup": "constant",
    "cosine_with_restarts": "cosine-restarts",
    "criterion": "loss",
    "cuda": "gpu",
    "dataset": "data",
    "ddp": "data-parallel",
    "deepspeed": "sharded",
    "devices": "replicas",
    "eps": "epsilon",
    "eval_steps": "evaluation.every_steps",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fsdp": "sharded",
    "gradient_checkpointing": "recompute",
    "gradient_clip_val": "clip.global_norm",
    "inverse_sqrt": "inverse-sqrt",
    "learning_rate": "lr",
    "loss_fn": "loss",
    "lr_scheduler": "schedule",
    "max_epochs": "epochs",
    "max_grad_norm": "clip.global_norm",
    "max_steps": "steps",
    "mixed_precision": "precision",
    "multistep": "milestones",
    "np": "replicas",
    "nproc_per_node": "replicas",
    "num_processes": "replicas",
    "num_train_epochs": "epochs",
    "num_workers": "loader.workers",
    "onecycle": "one-cycle",
    "per_device_train_batch_size": "local_batch_size",
    "profiler": "profile",
    "random_seed": "seed",
    "reduce_lr_on_plateau": "plateau",
    "scheduler": "schedule",
    "track_grad_norm": "gradient_norm",
    "train_batch_size": "global_batch_size",
    "warmup_stable_decay": "wsd",
    "zero": "sharded",
}
"""Names in other tools to isotrain's names for fields, values, options and strategies, where they differ.

A field of a table in the spec has the table's name before it.
"""
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


@dataclass(frozen=True)
class Problem:
    """One problem of a spec.

    Attributes:
        expected: Expected value, in words that follow "expected".
        at: Path of the field, relative to the value that is being validated.
        received: Received value; left out if it is missing.
        hint: Advice: the value that was probably meant, or what to do.
    """

    expected: str
    at: tuple[str | int, ...] = ()
    received: Any = _ABSENT
    hint: str = ""

    @staticmethod
    def of(error: PydanticCustomError) -> Problem:
        """Problem of an error that `Problem.error` made."""
        context = error.context or {}
        problem = context["problem"]
        assert isinstance(problem, Problem)
        return problem

    def below(self, key: str | int) -> Problem:
        """The problem with a path from one level up."""
        return replace(self, at=(key, *self.at))

    def error(self) -> PydanticCustomError:
        """Pydantic error for a validator to raise."""
        return PydanticCustomError(
            _KIND, "{expected}", {"problem": self, "expected": self.expected}
        )

    def text(self, path: tuple[str | int, ...] = ()) -> str:
        """Message in one line: field path, received and expected value, hint."""
        field = ".".join(str(part) for part in (*path, *self.at)) or "spec"
        received = "missing" if self.received is _ABSENT else f"got {short(self.received)}"
        hint = f"; {self.hint}" if self.hint else ""
        return f"{field}: {received}; expected {self.expected}{hint}"


class SpecModel(BaseModel):
    """Frozen section of the spec that reports all of its problems at once."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, **fields: Any) -> None:
        """Validates the fields; a `SpecError` lists all that are invalid."""
        with as_spec_error(type(self).__name__):
            self.__pydantic_validator__.validate_python(fields, self_instance=self)

    # pydantic builds nested sections without __init__ when it is marked like its own; their problems
    # then join those of the outer section.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """Problems of combinations of fields, checked before the fields are validated."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _gather(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, Mapping):
            return handler(value)
        fields = {str(name): as_python_number(field) for name, field in value.items()}
        problems = [
            unknown_field(name, field, cls.model_fields)
            for name, field in fields.items()
            if name not in cls.model_fields
        ]
        problems += cls.rules(fields)
        known_fields = {name: field for name, field in fields.items() if name in cls.model_fields}
        try:
            section = handler(known_fields)
        except ValidationError as error:
            raise combined(cls, problems, error, value) from None
        raise_all(cls.__name__, problems, value)
        return section


def as_python_number(value: Any) -> Any:
    """Python number of a NumPy scalar; other values unchanged."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def exactly_one(fields: Mapping[str, Any], *names: str) -> Iterator[Problem]:
    """Problem if not exactly one of the fields is set."""
    if all(fields.get(name) is None for name in names):
        yield Problem("exactly one of them", (" or ".join(names),))
    yield from at_most_one(fields, *names)


def at_most_one(fields: Mapping[str, Any], *names: str) -> Iterator[Problem]:
    """Problem if more than one of the fields is set."""
    present = {name: fields[name] for name in names if fields.get(name) is not None}
    if len(present) > 1:
        hint = f"leave all but one out, or set them to null (--set {[*present][-1]}=null)"
        yield Problem("only one of them", (" and ".join(present),), present, hint)


def suggest(name: object, known: Iterable[str]) -> str:
    """Hint with the known name that was probably meant; empty for none."""
    names = list(known)
    translated = OTHER_TOOLS_NAMES.get(str(name).lower(), "")
    meant = translated if translated.partition(".")[0] in names else nearest(str(name), names)
    return whether_meant(meant, "did")


def unknown_choice(name: object, known: Iterable[str], at: tuple[str | int, ...]) -> Problem:
    """Problem of a name that is not among the known ones."""
    names = list(known)
    return Problem(f"one of {', '.join(names)}", at, name, suggest(name, names))


def unknown_field(name: str, value: Any, known: Iterable[str]) -> Problem:
    """Problem of a field that is not among the known ones."""
    names = list(known)
    hint = suggest(name, names)
    expected = "a field that exists" if hint else f"one of the fields {', '.join(names)}"
    return Problem(expected, (name,), value, hint)


def short(value: Any) -> str:
    """Text of a value, at most about 80 characters."""
    if isinstance(value, BaseModel) or not isinstance(
        value, str | int | float | list | tuple | dict | NoneType
    ):
        return describe(value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def raise_all(title: str, problems: Iterable[Problem], value: Any) -> None:
    """Raises one validation error for all problems, if there are any."""
    details = [_detail(problem, (), value) for problem in problems]
    if details:
        raise ValidationError.from_exception_data(title, details)


def combined(
    model: type[BaseModel], problems: Iterable[Problem], error: ValidationError, value: Any
) -> ValidationError:
    """Pydantic error with more problems, and with isotrain's texts for field errors."""
    details = [_detail(problem, (), value) for problem in problems]
    details += [
        _from_pydantic(model, each)
        for each in error.errors(include_url=False)
        if each["type"]
        != "default_factory_not_called"  # for want of other fields, reported themselves
    ]
    return ValidationError.from_exception_data(model.__name__, details)


@contextmanager
def as_spec_error(what: str) -> Iterator[None]:
    """Context that converts a pydantic error to a SpecError with all problems of `what`."""
    try:
        yield
    except ValidationError as error:
        raise spec_error(what, _texts(error)) from None


def spec_error(what: str, texts: Iterable[str]) -> SpecError:
    """SpecError that lists texts, each once."""
    lines = list(dict.fromkeys(texts))
    count = counted(len(lines), "problem")
    return SpecError("\n".join([f"{count} in {what}:", *(f"  {line}" for line in lines)]))


class ExpectedText(str):
    """Text for what a field accepts, where type and bounds do not say it; used in `Annotated`."""


def expected_of(field: FieldInfo) -> str:
    """Text for what a field accepts: type, bounds and whether it may be null."""
    for item in field.metadata:
        if isinstance(item, ExpectedText):
            return str(item)
    kinds, optional = _kinds(field.annotation)
    bounds = [*_bounds(field.metadata)]
    for kind in kinds:
        bounds += _bounds(getattr(kind, "__metadata__", ()))
    words = " or ".join(dict.fromkeys(map(_kind_text, kinds)))
    text = f"{words} {' and '.join(bounds)}" if bounds else words
    return f"{text}, or null" if optional else text


def table_keys(field: FieldInfo) -> list[str] | None:
    """Keys of a field that takes nothing but a table, or null: those that it must have are marked as needed.

    None for a field that takes another value too; empty if the keys are the user's.
    """
    kinds, _ = _kinds(field.annotation)
    has_shorthand = any(isinstance(item, BeforeValidator) for item in field.metadata)
    if len(kinds) > 1 or has_shorthand:
        return None
    (kind,) = kinds
    if get_origin(kind) is dict:
        return []
    if not (isinstance(kind, type) and issubclass(kind, SpecModel)):
        return None
    return [
        f"{name} (needed)" if each.is_required() else name
        for name, each in kind.model_fields.items()
    ]


def _texts(error: ValidationError) -> Iterator[str]:
    for details in error.errors(include_url=False):
        path = tuple(part for part in details["loc"] if not str(part).startswith(BRANCH))
        problem = _problem_of(details)
        yield (problem or Problem(details["msg"], (), details["input"])).text(path)


def _problem_of(details: Mapping[str, Any]) -> Problem | None:
    return details["ctx"]["problem"] if details["type"] == _KIND else None


def _detail(problem: Problem, loc: tuple[int | str, ...], value: Any) -> InitErrorDetails:
    return InitErrorDetails(type=problem.error(), loc=loc, input=value)


def _from_pydantic(model: type[BaseModel], details: Mapping[str, Any]) -> InitErrorDetails:
    loc: tuple[int | str, ...] = details["loc"]
    return _detail(_problem_of(details) or _translate(model, details), loc, details["input"])


def _translate(model: type[BaseModel], details: Mapping[str, Any]) -> Problem:
    loc, value = details["loc"], details["input"]
    field = model.model_fields.get(str(loc[0])) if loc else None
    if loc and loc[-1] == "[key]":
        return Problem("text as the key", (), value)
    if field is None or len(loc) > 1:
        return Problem(str(_ERRORS.get(details["type"], details["msg"])), (), value)
    if details["type"] == "missing":
        return Problem(expected_of(field))
    if details["type"] == "literal_error":
        choices = [str(choice) for kind in _kinds(field.annotation)[0] for choice in get_args(kind)]
        return Problem(expected_of(field), (), value, suggest(value, choices))
    return Problem(expected_of(field), (), value)


def _kinds(annotation: Any) -> tuple[list[Any], bool]:
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation], False
    kinds = get_args(annotation)
    return [kind for kind in kinds if kind is not NoneType], NoneType in kinds


def _kind_text(kind: Any) -> str:
    bare = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    if get_origin(bare) is Literal:
        return f"one of {', '.join(str(choice) for choice in get_args(bare))}"
    return _KIND_TEXTS.get(bare, "a table")


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(item.metadata)
        for name, sign in _BOUNDS:
            if getattr(item, name, None) is not None:
                yield f"{sign} {getattr(item, name)}"
