"""Selection of one of a model's outputs, in predictions and in targets; imports no framework."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from isotrain.plugin import SpecError, UnsupportedError, unweighted

if TYPE_CHECKING:
    from isotrain.plugin import TrainingSpec


FRAMEWORKS = ("torch", "tensorflow", "jax")
"""Keys that are frameworks, besides those for which the spec gives a model."""


def check_loss_table(spec: TrainingSpec, framework: str) -> None:
    """Refuses a table of losses that mixes frameworks and outputs, before anything starts.

    Args:
        spec: Training spec.
        framework: Framework whose entries of the spec apply.

    Raises:
        SpecError: Some of its keys are frameworks and others are not; or all are, and none is this one.
    """
    table = spec.loss
    if not isinstance(table, Mapping):
        return
    models = spec.model if isinstance(spec.model, Mapping) else ()
    framework_keys = {*FRAMEWORKS, *models} & set(table)
    if framework_keys and not set(table) <= framework_keys | {framework}:
        raise SpecError(_mixed_table(table, framework_keys))
    if framework_keys:
        spec.for_framework("loss", framework)


def _mixed_table(table: Mapping[str, Any], framework_keys: Collection[str]) -> str:
    """Message for a table of losses by framework and by output at once."""
    return (
        f"loss: of {', '.join(table)}, {', '.join(sorted(framework_keys))} are frameworks and the others"
        " are not. Give a table of frameworks or one of outputs; for outputs named like a framework, give a"
        " table of outputs for each framework: {torch: {name: loss, ...}, tensorflow: {...}}."
    )


@dataclass(frozen=True)
class OutputSelector:
    """Selects the parts of predictions and targets that belong to one output.

    Attributes:
        names: Names of outputs that come in a tuple or list; those in a dict have their own.
    """

    names: Sequence[str] = ()

    @classmethod
    def of_keras(cls, model: Any) -> OutputSelector:
        """Selector for a Keras model, by its output names."""
        return cls(getattr(model, "output_names", None) or ())

    def pick(self, tree: Any, output: str | None, what: str) -> Any:
        """The part of predictions or targets that belongs to an output.

        Args:
            tree: All predictions or targets.
            output: Name of the output; None for all.
            what: Name of the tree, for messages.

        Raises:
            SpecError: There is no output of that name.
        """
        if output is None:
            return tree
        parts = self._parts(tree)
        if output not in parts:
            raise SpecError(
                f"loss or metrics: expected an output {output!r} in the {what}, which have"
                f" {', '.join(map(repr, parts)) or 'no names'}. Name the outputs of the model (a dict), and"
                " give the targets the same names."
            )
        return parts[output]

    def _parts(self, tree: Any) -> Mapping[str, Any]:
        if isinstance(tree, Mapping) or isinstance(tree := as_plain_tree(tree), Mapping):
            return tree
        outputs = tree if isinstance(tree, tuple | list) else [tree]
        return (
            dict(zip(self.names, outputs, strict=False)) if len(outputs) == len(self.names) else {}
        )

    def of_targets(self, targets: Any, output: str | None) -> Any:
        """Targets of an output, without sample weights."""
        return self.pick(unweighted(targets)[0], output, "targets")

    def sample(
        self, targets: Any, predictions: Any, output: str | None
    ) -> tuple[Any, Any, Any | None]:
        """Targets, predictions and sample weights (or None) of an output.

        Args:
            targets: All targets, with their weights where they have some.
            predictions: All predictions.
            output: Name of the output; None for all.
        """
        plain, weights = unweighted(targets)
        if output is not None and isinstance(weights, Mapping | tuple):
            weights = self.pick(weights, output, "sample weights")
        return (
            self.pick(plain, output, "targets"),
            self.pick(predictions, output, "predictions"),
            weights,
        )


def as_plain_tree(tree: Any) -> Any:
    """A model's outputs with dataclasses and named tuples as dicts, by the names of their fields.

    Fields that are None are left out, as model libraries do: there is no such output.
    """
    if is_dataclass(tree) and not isinstance(tree, Mapping):
        tree = {field.name: getattr(tree, field.name) for field in fields(tree)}
    elif isinstance(tree, tuple) and hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        return {name: as_plain_tree(part) for name, part in tree.items() if part is not None}
    return type(tree)(map(as_plain_tree, tree)) if type(tree) in (tuple, list) else tree


def no_single_model_error(names: Iterable[str]) -> UnsupportedError:
    """The error for a call, or an export to a framework's own file, of a model that is a dict of models."""
    return UnsupportedError(
        f"model: it is a dict of models ({', '.join(names)}), and none of them is meant by itself. Name one"
        " in `call`, a function (models, inputs) -> predictions; export its weights as safetensors."
    )


def objective_batch(inputs: Any, targets: Any) -> tuple[Any, ...]:
    """Arguments of an objective: inputs, targets, and sample weights where there are some."""
    plain, weights = unweighted(targets)
    return (inputs, plain) if weights is None else (inputs, plain, weights)
