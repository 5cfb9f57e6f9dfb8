"""Every problem of a training spec, gathered into one SpecError, and the model that does so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

from isotrain.core.errors import SpecError, nearest, whether_meant
from isotrain.core.spec.import_strings import describe

BRANCH = "\x1f"  # starts the label of a union's branch, which no person should see
_KIND = "isotrain"
_ABSENT = object()
_WORDS = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}
_ERRORS = {"model_type": "a table", "dict_type": "a table", "string_type": "text"}
ELSEWHERE = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "batch_size": "global_batch_size",
    "bf16": "bfloat16",
    "callbacks": "loggers",
    "checkpointing": "checkpoint",
    "criterion": "loss",
    "cuda": "gpu",
    "dataset": "data",
    "eps": "epsilon",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "gradient_clip_val": "clip",
    "learning_rate": "lr",
    "loss_fn": "loss",
    "lr_scheduler": "schedule",
    "max_epochs": "epochs",
    "max_grad_norm": "clip",
    "max_steps": "steps",
    "mixed_precision": "precision",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "local_batch_size",
    "random_seed": "seed",
    "scheduler": "schedule",
    "train_batch_size": "global_batch_size",
}
"""What fields and values are called in other tools, where no likeness of letters leads to our name."""
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        expected: What would be right, in words that follow "expected".
        at: Where, relative to the value that is being validated.
        received: The value there; nothing when it is missing.
        hint: What was probably meant, or what to do.
    """

    expected: str
    at: tuple[str | int, ...] = ()
    received: Any = _ABSENT
    hint: str = ""

    @staticmethod
    def of(error: PydanticCustomError) -> Problem:
        """The problem that `error` was made from."""
        context = error.context or {}
        found = context["problem"]
        assert isinstance(found, Problem)
        return found

    def below(self, key: str | int) -> Problem:
        """The same problem seen from one level up."""
        return replace(self, at=(key, *self.at))

    def error(self) -> PydanticCustomError:
        """The problem as an error for a validator to raise."""
        return PydanticCustomError(
            _KIND, "{expected}", {"problem": self, "expected": self.expected}
        )

    def text(self, path: tuple[str | int, ...] = ()) -> str:
        """One line: field path, value received, what was expected, what was probably meant."""
        where = ".".join(str(part) for part in (*path, *self.at)) or "spec"
        got = "missing" if self.received is _ABSENT else f"got {short(self.received)}"
        return f"{where}: {got}; expected {self.expected}{f'; {self.hint}' if self.hint else ''}"


class SpecModel(BaseModel):
    """A frozen part of the spec that reports all of its problems at once."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, **fields: Any) -> None:
        """Validates the fields.

        Raises:
            SpecError: Lists every field that is wrong.
        """
        with as_spec_error(type(self).__name__):
            self.__pydantic_validator__.validate_python(fields, self_instance=self)

    # pydantic builds nested parts without __init__ when it is marked like its own; their problems
    # then join those of the whole.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def rules(cls, fields: Mapping[str, Any]) -> Iterator[Problem]:
        """What is wrong between the fields, seen before they are validated."""
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
        known = {name: field for name, field in fields.items() if name in cls.model_fields}
        try:
            part = handler(known)
        except ValidationError as error:
            raise combined(cls, problems, error, value) from None
        raise_all(cls.__name__, problems, value)
        return part


def as_python_number(value: Any) -> Any:
    """A NumPy scalar as the Python number it stands for; anything else unchanged."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return value


def exactly_one(fields: Mapping[str, Any], *names: str) -> Iterator[Problem]:
    """The problem that not exactly one of the fields `names` is given, if so."""
    if all(fields.get(name) is None for name in names):
        yield Problem("exactly one of them", (" or ".join(names),))
    yield from at_most_one(fields, *names)


def at_most_one(fields: Mapping[str, Any], *names: str) -> Iterator[Problem]:
    """The problem that more than one of the fields `names` is given, if so."""
    given = {name: fields[name] for name in names if fields.get(name) is not None}
    if len(given) > 1:
        hint = f"leave all but one out, or set them to null (--set {[*given][-1]}=null)"
        yield Problem("only one of them", (" and ".join(given),), given, hint)


def near(name: object, known: Iterable[str]) -> str:
    """The hint that names what other tools call so, or the nearest right name, or nothing."""
    names = list(known)
    own = ELSEWHERE.get(str(name).lower())
    meant = own if own in names else nearest(str(name), names)
    return whether_meant(meant, "did")


def unknown_choice(name: object, known: Iterable[str], at: tuple[str | int, ...]) -> Problem:
    """A name that is none of the `known` ones."""
    names = list(known)
    return Problem(f"one of {', '.join(names)}", at, name, near(name, names))


def unknown_field(name: str, value: Any, known: Iterable[str]) -> Problem:
    """A field that does not exist beside the `known` ones."""
    names = list(known)
    hint = near(name, names)
    expected = "a field that exists" if hint else f"one of the fields {', '.join(names)}"
    return Problem(expected, (name,), value, hint)


def short(value: Any) -> str:
    """A value in at most about 80 characters."""
    if isinstance(value, BaseModel) or not isinstance(
        value, str | int | float | list | tuple | dict | NoneType
    ):
        return describe(value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def raise_all(title: str, problems: Iterable[Problem], value: Any) -> None:
    """Raises one validation error for all `problems`, if there are any."""
    details = [_detail(found, (), value) for found in problems]
    if details:
        raise ValidationError.from_exception_data(title, details)


def combined(
    model: type[BaseModel], problems: Iterable[Problem], error: ValidationError, value: Any
) -> ValidationError:
    """Adds `problems` to an error of `model`, and puts its field errors into our words."""
    details = [_detail(found, (), value) for found in problems]
    details += [_from_pydantic(model, found) for found in error.errors(include_url=False)]
    return ValidationError.from_exception_data(model.__name__, details)


@contextmanager
def as_spec_error(what: str) -> Iterator[None]:
    """Turns a pydantic error into the SpecError that lists every problem of `what`."""
    try:
        yield
    except ValidationError as error:
        raise spec_error(what, _texts(error)) from None


def spec_error(what: str, texts: Iterable[str]) -> SpecError:
    """The SpecError that lists `texts`, each once."""
    lines = list(dict.fromkeys(texts))
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    return SpecError("\n".join([f"{count} in {what}:", *(f"  {line}" for line in lines)]))


class Words(str):
    """What a field accepts, in words, where kind and bounds do not say it; goes in Annotated."""


def expected_of(field: FieldInfo) -> str:
    """What a field accepts, in words: kind, bounds and whether it may be absent."""
    for item in field.metadata:
        if isinstance(item, Words):
            return str(item)
    kinds, optional = _kinds(field.annotation)
    bounds = [*_bounds(field.metadata)]
    for kind in kinds:
        bounds += _bounds(getattr(kind, "__metadata__", ()))
    words = " or ".join(_word(kind) for kind in kinds)
    text = f"{words} {' and '.join(bounds)}" if bounds else words
    return f"{text}, or null" if optional else text


def _texts(error: ValidationError) -> Iterator[str]:
    for found in error.errors(include_url=False):
        path = tuple(p for p in found["loc"] if not str(p).startswith(BRANCH))
        own = _own_problem(found)
        yield (own or Problem(found["msg"], (), found["input"])).text(path)


def _own_problem(found: Mapping[str, Any]) -> Problem | None:
    return found["ctx"]["problem"] if found["type"] == _KIND else None


def _detail(found: Problem, loc: tuple[int | str, ...], value: Any) -> InitErrorDetails:
    return InitErrorDetails(type=found.error(), loc=loc, input=value)


def _from_pydantic(model: type[BaseModel], found: Mapping[str, Any]) -> InitErrorDetails:
    loc: tuple[int | str, ...] = found["loc"]
    return _detail(_own_problem(found) or _translate(model, found), loc, found["input"])


def _translate(model: type[BaseModel], found: Mapping[str, Any]) -> Problem:
    loc, value = found["loc"], found["input"]
    field = model.model_fields.get(str(loc[0])) if loc else None
    if loc and loc[-1] == "[key]":
        return Problem("text as the key", (), value)
    if field is None or len(loc) > 1:
        return Problem(_word_of_error(found), (), value)
    if found["type"] == "missing":
        return Problem(expected_of(field))
    if found["type"] == "literal_error":
        choices = [str(choice) for kind in _kinds(field.annotation)[0] for choice in get_args(kind)]
        return Problem(expected_of(field), (), value, near(value, choices))
    return Problem(expected_of(field), (), value)


def _word_of_error(found: Mapping[str, Any]) -> str:
    return str(_ERRORS.get(found["type"], found["msg"]))


def _kinds(annotation: Any) -> tuple[list[Any], bool]:
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation], False
    kinds = get_args(annotation)
    return [kind for kind in kinds if kind is not NoneType], NoneType in kinds


def _word(kind: Any) -> str:
    bare = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    if get_origin(bare) is Literal:
        return f"one of {', '.join(str(choice) for choice in get_args(bare))}"
    return _WORDS.get(bare, "a table")


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    for item in metadata:
        if isinstance(item, FieldInfo):
            yield from _bounds(item.metadata)
        for name, sign in _BOUNDS:
            if getattr(item, name, None) is not None:
                yield f"{sign} {getattr(item, name)}"
