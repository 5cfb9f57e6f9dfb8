"""Recognises which form of an optimizer made an update, by where it adds its epsilon.

Sampled elements of the gradients are put through each form, and the weights' movement compared. Adam: D. P.
Kingma, J. Ba, "Adam: a method for stochastic optimization", 2015, whose algorithm 1 adds epsilon to the
corrected root, and whose section 2 has the form in which it is added to the uncorrected one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isotrain.analysis.parity.causes.clipping import clipped
from isotrain.analysis.parity.run_trace import RunTrace, StepTrace, Tensors
from isotrain.core.spec.training_spec import TrainingSpec

CLEARLY = 0.2
"""A form is recognised if its error is below this fraction of every other form's error."""

Options = Mapping[str, float]
Formulas = dict[str, np.ndarray]


@dataclass(frozen=True)
class OptimizerForm:
    """The form that explains a run's update best.

    Attributes:
        formula: Formula of the update.
        error: Norm of the prediction error relative to the norm of the update.
        errors: Error of every form, by formula.
    """

    formula: str
    error: float
    errors: Mapping[str, float]


def epsilon_form(spec: TrainingSpec, run: RunTrace, index: int) -> OptimizerForm | None:
    """The form of the update in the traced step with that index; None if no form fits clearly best."""
    forms = _FORMS.get(spec.optimizer.name)
    if forms is None or not _is_plain(spec):
        return None
    by_rounding = [_errors(spec, run, index, forms, rounded) for rounded in (float, _float32)]
    errors = {form: min(errors[form] for errors in by_rounding) for form in by_rounding[0]}
    best, *others = sorted(errors, key=lambda form: errors[form])
    if not others or errors[best] > CLEARLY * errors[others[0]]:
        return None
    return OptimizerForm(best, errors[best], errors)


def _is_plain(spec: TrainingSpec) -> bool:
    """Whether the optimizer uses only options that `_FORMS` cover."""
    optimizer = spec.optimizer
    return optimizer.is_plain and (optimizer.decay_is_decoupled or not optimizer.weight_decay)


def _float32(value: float) -> float:
    """A hyperparameter rounded to float32, as some frameworks pass it."""
    return float(np.float32(value))


def _errors(
    spec: TrainingSpec, run: RunTrace, index: int, forms: Any, rounded: Any
) -> dict[str, float]:
    options = {
        name: rounded(value)
        for name, value in spec.optimizer.model_dump().items()
        if isinstance(value, float)
    }
    history = [_clipped(step, spec) for step in run.steps[: index + 1]]
    rate = rounded(run.steps[index].learning_rate)
    before, after = run.before(index, "weight"), run.steps[index].tensors["weight"]
    names = [name for name in history[0] if name in after]
    weights = _column(before, names)
    update = _column(after, names) - weights
    gradients = [_column(step_gradients, names) for step_gradients in history]
    decay = rate * options.get("weight_decay", 0.0) * weights
    size = float(np.linalg.norm(update)) or 1.0
    predictions: Formulas = forms(gradients, options)
    return {
        form: float(np.linalg.norm(update + rate * step + decay)) / size
        for form, step in predictions.items()
    }


def _clipped(step: StepTrace, spec: TrainingSpec) -> Tensors:
    return step.update if spec.clip is None else clipped(step.update, spec.clip)


def _column(tensors: Tensors, names: list[str]) -> np.ndarray:
    """The sampled elements of all tensors concatenated, shape [samples]."""
    return np.concatenate([np.asarray(tensors[name].sample) for name in names])


def _adam(gradients: list[np.ndarray], options: Options) -> Formulas:
    """Updates by each form of Adam (Kingma & Ba 2015) after gradients of one shape; same shape."""
    first, second = np.zeros_like(gradients[0]), np.zeros_like(gradients[0])
    b1, b2, epsilon = options["beta_1"], options["beta_2"], options["epsilon"]
    for gradient in gradients:
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
    c1, c2 = 1 - b1 ** len(gradients), 1 - b2 ** len(gradients)
    m, v = first / c1, second / c2
    return {
        "m / (√v + ε), v corrected": m / (np.sqrt(v) + epsilon),
        "m / (√v + ε), v uncorrected": np.sqrt(c2) * m / (np.sqrt(second) + epsilon),
        "m / √(v + ε), v corrected": m / np.sqrt(v + epsilon),
        "m / √(v + ε), v uncorrected": np.sqrt(c2) * m / np.sqrt(second + epsilon),
    }


def _rmsprop(gradients: list[np.ndarray], options: Options) -> Formulas:
    """Updates by each form of RMSprop (Tieleman & Hinton 2012) after gradients of one shape; same shape."""
    second = np.zeros_like(gradients[0])
    for gradient in gradients:
        second = options["rho"] * second + (1 - options["rho"]) * gradient**2
    return _two_forms(gradients[-1], second, options["epsilon"])


def _adagrad(gradients: list[np.ndarray], options: Options) -> Formulas:
    """Updates by each form of Adagrad (Duchi et al. 2011) after gradients of one shape; same shape."""
    total = np.full_like(gradients[0], options["initial_accumulator_value"])
    for gradient in gradients:
        total = total + gradient**2
    return _two_forms(gradients[-1], total, options["epsilon"])


def _two_forms(gradient: np.ndarray, second: np.ndarray, epsilon: float) -> Formulas:
    """Gradient over the root of its second moment, with epsilon outside and inside of the root; any shape."""
    return {
        "g / (√v + ε)": gradient / (np.sqrt(second) + epsilon),
        "g / √(v + ε)": gradient / np.sqrt(second + epsilon),
    }


_FORMS = {"adam": _adam, "adamw": _adam, "rmsprop": _rmsprop, "adagrad": _adagrad}
