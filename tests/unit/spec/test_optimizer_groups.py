"""Groups of weights in the optimizer section, and layer-wise rates."""

from __future__ import annotations

from typing import Any

import pytest

from isotrain.core.errors import SpecError
from isotrain.core.spec.optimizer_groups import group_notes, layer_name, weight_groups
from isotrain.core.spec.optimizers import (
    Adagrad,
    Adam,
    AdamW,
    Lamb,
    Lion,
    Muon,
    Nadam,
    OptimizerGroup,
    Radam,
    RmsProp,
    Sgd,
)

NAMES = ["stem/kernel", "stem/bias", "body/norm/gamma", "head/kernel", "head/bias"]
TORCH_NAMES = [
    "cls",
    "blocks.0.norm.weight",
    "blocks.0.mlp.1.weight",
    "blocks.1.mlp.weight",
    "head.bias",
]


def grouped(optimizer: Any, names: list[str] = NAMES) -> dict[str, tuple[float, dict[str, Any]]]:
    groups = weight_groups(optimizer, names)
    by_index = {index: group for group in groups for index in group.indices}
    return {
        name: (by_index[index].lr_factor, dict(by_index[index].options))
        for index, name in enumerate(names)
    }


def test_a_weight_belongs_to_the_first_group_that_fits() -> None:
    groups = [
        {"weights": "*bias", "weight_decay": 0},
        {"weights": "head*", "lr_factor": 2, "beta_1": 0.5},
    ]
    assert grouped(AdamW(groups=groups)) == {
        "stem/kernel": (1.0, {}),
        "stem/bias": (1.0, {"weight_decay": 0}),
        "body/norm/gamma": (1.0, {}),
        "head/kernel": (2.0, {"beta_1": 0.5}),
        "head/bias": (1.0, {"weight_decay": 0}),
    }


def test_without_groups_all_weights_are_updated_together() -> None:
    (group,) = weight_groups(Sgd(lr=0.1), NAMES)
    assert group.has_spec_options
    assert group.indices == (0, 1, 2, 3, 4)


def test_groups_of_some_weights_are_read_from_the_names_of_all() -> None:
    optimizer = Sgd(lr=0.1, groups=[{"weights": "stem*", "lr_factor": 0.5}])
    (group,) = weight_groups(optimizer, NAMES, NAMES[2:])
    assert group.has_spec_options


def test_a_pattern_without_weights_is_refused_with_the_names() -> None:
    optimizer = Sgd(lr=0.1, groups=[{"weights": ["*kernel", "backbone*"], "lr_factor": 0.5}])
    expected = (
        r"optimizer\.groups\[0\]\.weights: 'backbone\*' fits none of .* stem/kernel, stem/bias"
    )
    with pytest.raises(SpecError, match=expected):
        weight_groups(optimizer, NAMES)


@pytest.mark.parametrize(
    ("optimizer", "fields", "line"),
    [
        (
            Sgd,
            {"lr": 0.1, "groups": [{"weights": "*", "beta_1": 0.5}]},
            "groups.0.beta_1: got 0.5; expected an option",
        ),
        (
            Sgd,
            {"lr": 0.1, "groups": [{"weights": "*", "nesterov": True}]},
            "a momentum > 0 with nesterov",
        ),
        (
            Sgd,
            {
                "lr": 0.1,
                "momentum": 0.5,
                "groups": [{"weights": "*", "momentum": 0, "nesterov": True}],
            },
            "a momentum > 0 with nesterov",
        ),
        (RmsProp, {"groups": [{"weights": "*", "amsgrad": True}]}, "an option of this optimizer"),
        (Adam, {"groups": [{"weights": "*", "lr_factor": -1}]}, "groups.0.lr_factor"),
        (Adam, {"groups": [{"lr_factor": 1}]}, "groups.0.weights"),
        (Adam, {"groups": [{"weights": "*", "lr": 1}]}, "groups.0.lr"),
        (Adam, {"groups": [{"weights": "*", "schedule": "plateau"}]}, "groups.0.schedule"),
        (
            Adam,
            {
                "groups": [
                    {
                        "weights": "*",
                        "schedule": {"name": "one-cycle", "momentum_range": [0.5, 0.75]},
                    }
                ]
            },
            "a function of the step, without momentum_range",
        ),
        (Adam, {"layer_decay": 0}, "layer_decay"),
        (Adam, {"layer_decay": 1.5}, "layer_decay"),
    ],
)
def test_invalid_groups(optimizer: Any, fields: dict[str, Any], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        optimizer(**fields)
    assert line in str(caught.value).replace("[", ".").replace("]", "")


@pytest.mark.parametrize(
    "kind", [Sgd, Adam, AdamW, RmsProp, Adagrad, Lamb, Lion, Muon, Nadam, Radam]
)
def test_a_group_may_set_every_option(kind: Any) -> None:
    """All but the name, and but the rate, for which groups have `lr_factor` and `schedule`."""
    others = {"name", "lr", "groups", "layer_decay"}
    assert kind.model_fields.keys() - others <= OptimizerGroup.model_fields.keys()


def test_slots_are_those_of_all_groups() -> None:
    def group(**options: Any) -> list[dict[str, Any]]:
        return [{"weights": "head*", **options}, {"weights": "*bias"}]

    assert Adam(groups=group(amsgrad=True)).slots == ("momentum", "velocity", "velocity_hat")
    assert Sgd(lr=0.1, groups=group(momentum=0.5)).slots == ("momentum",)
    assert RmsProp(groups=group(centered=True)).slots == ("velocity", "average_gradient")
    assert grouped(Sgd(lr=0.1, groups=group(momentum=0.5))) == {
        name: (1.0, {"momentum": 0.5 if name.startswith("head") else 0.0}) for name in NAMES
    }


def test_weights_of_a_schedule_are_a_group_of_their_own() -> None:
    groups = [{"weights": "stem*", "schedule": "cosine"}, {"weights": "*bias"}]
    optimizer = Sgd(lr=0.1, groups=groups)
    by_schedule = {group.schedule: group.indices for group in weight_groups(optimizer, NAMES)}
    assert by_schedule == {0: (0, 1), None: tuple(range(2, len(NAMES)))}
    assert "schedule cosine" in group_notes(optimizer, NAMES)[0]


def test_layers_are_numbered_parts_or_the_names_without_the_weight() -> None:
    assert [layer_name(name) for name in TORCH_NAMES] == [
        "cls",
        "blocks.0",
        "blocks.0",
        "blocks.1",
        "head",
    ]
    assert layer_name("0.weight") == "0"
    assert layer_name("model/stem/conv/kernel") == "model.stem.conv"


def test_layer_decay_multiplies_the_rates_of_groups() -> None:
    optimizer = Sgd(lr=0.1, layer_decay=0.5, groups=[{"weights": "cls", "lr_factor": 4}])
    factors = {name: factor for name, (factor, _) in grouped(optimizer, TORCH_NAMES).items()}
    assert list(factors.values()) == [4 * 0.125, 0.25, 0.25, 0.5, 1.0]


def test_layers_by_patterns() -> None:
    layers = [["cls", "blocks.0*"], "blocks.1*", "head*"]
    optimizer = Sgd(lr=0.1, layer_decay={"factor": 0.5, "layers": layers})
    factors = [factor for factor, _ in grouped(optimizer, TORCH_NAMES).values()]
    assert factors == [0.25, 0.25, 0.25, 0.5, 1.0]
    with pytest.raises(SpecError, match=r"no layer has the trainable weight 'stem/kernel'"):
        weight_groups(optimizer.model_copy(update={"groups": ()}), ["stem/kernel", *TORCH_NAMES])
    with pytest.raises(SpecError, match=r"layers\[1\]: 'blocks\.1\*' fits none"):
        weight_groups(optimizer, ["cls", "blocks.0.bias", "head.bias"])


def test_the_plan_says_how_many_weights_each_group_has() -> None:
    groups = [{"weights": ["*bias", "*norm*"], "weight_decay": 0}, {"weights": "*bias"}]
    notes = group_notes(AdamW(groups=groups, layer_decay=0.5), NAMES)
    assert notes == [
        "optimizer.groups: 3 weights (*bias, *norm*); 0 weights (*bias); 2 in no group",
        "optimizer.layer_decay: the rates of 3 layers are 0.25 to 1 times that of the step",
    ]
    assert group_notes(AdamW(), NAMES) == []
