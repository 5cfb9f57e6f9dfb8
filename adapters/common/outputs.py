"""One of several outputs of a model, in predictions and in targets; imports no framework."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from isotrain.plugin import SpecError, unweighted

if TYPE_CHECKING:
    from isotrain.plugin import TrainingSpec


FRAMEWORKS = ("torch", "tensorflow", "jax")
"""Names that stand for a framework, beside those for which the spec gives a model."""


def check_loss_table(spec: TrainingSpec, framework: str) -> None:
    """Makes sure that a table of losses says one thing, before anything starts.

    Args:
        spec: Of the plan.
        framework: Whose entries of the spec are taken.

    Raises:
        SpecError: Some of its names are frameworks and others are not; or all are, and none is this one.
    """
    table = spec.loss
    if not isinstance(table, Mapping):
        return
    models = spec.model if isinstance(spec.model, Mapping) else ()
    known = {*FRAMEWORKS, *models} & set(table)
    if known and not set(table) <= known | {framework}:
        raise SpecError(_either(table, known))
    if known:
        spec.for_framework("loss", framework)


def _either(table: Mapping[str, Any], known: Collection[str]) -> str:
    """What to do about a table of losses by framework and by output."""
    return (
        f"loss: of {', '.join(table)}, {', '.join(sorted(known))} are frameworks and the others are not."
        " Give a table of frameworks or one of outputs; for outputs that are called like a framework, a table"
        " of outputs for each framework: {torch: {name: loss, ...}, tensorflow: {...}}."
    )


@dataclass(frozen=True)
class OutputSelector:
    """How the outputs of a model are told apart.

    Attributes:
        names: Of outputs that come in a tuple or list; those in a dict have their own.
    """

    names: Sequence[str] = ()

    @classmethod
    def of_keras(cls, model: Any) -> OutputSelector:
        """Those of a Keras model, as Keras calls them."""
        return cls(getattr(model, "output_names", None) or ())

    def pick(self, tree: Any, output: str | None, what: str) -> Any:
        """The part of predictions or targets that belongs to an output.

        Args:
            tree: All of them.
            output: Its name; None for all.
            what: What the tree is, for messages.

        Raises:
            SpecError: There is none of that name.
        """
        if output is None:
            return tree
        parts = self._parts(tree)
        if output not in parts:
            raise SpecError(
                f"loss or metrics: an output {output!r} is asked for, and the {what} have"
                f" {', '.join(map(repr, parts)) or 'no names'}. Name the outputs of the model (a dict), and"
                " the targets as these."
            )
        return parts[output]

    def _parts(self, tree: Any) -> Mapping[str, Any]:
        if isinstance(tree, Mapping) or isinstance(tree := as_plain_tree(tree), Mapping):
            return tree
        several = tree if isinstance(tree, tuple | list) else [tree]
        return (
            dict(zip(self.names, several, strict=False)) if len(several) == len(self.names) else {}
        )

    def of_targets(self, targets: Any, output: str | None) -> Any:
        """The targets of an output, without weights."""
        return self.pick(unweighted(targets)[0], output, "targets")

    def sample(
        self, targets: Any, predictions: Any, output: str | None
    ) -> tuple[Any, Any, Any | None]:
        """Targets, predictions and sample weights, or None for these, of an output.

        Args:
            targets: All, with their weights where they have some.
            predictions: All.
            output: Its name; None for all.
        """
        plain, weights = unweighted(targets)
        if output is not None and isinstance(weights, Mapping | tuple):
            weights = self.pick(weights, output, "sample weights")
        return (
            self.pick(plain, output, "targets"),
            self.pick(predictions, output, "predictions"),
            weights,
        )


def as_plain_tree(found: Any) -> Any:
    """What a model gave with its dataclasses and named tuples as dicts, by the names of their fields.

    Fields that are None are left out there, as libraries of models do: there is no such output.
    """
    if is_dataclass(found) and not isinstance(found, Mapping):
        found = {field.name: getattr(found, field.name) for field in fields(found)}
    elif isinstance(found, tuple) and hasattr(found, "_asdict"):
        found = found._asdict()
    if isinstance(found, Mapping):
        return {name: as_plain_tree(part) for name, part in found.items() if part is not None}
    return type(found)(map(as_plain_tree, found)) if type(found) in (tuple, list) else found


def objective_batch(inputs: Any, targets: Any) -> tuple[Any, ...]:
    """What an objective gets of a slice: inputs, targets, and sample weights where there are some."""
    plain, weights = unweighted(targets)
    return (inputs, plain) if weights is None else (inputs, plain, weights)
