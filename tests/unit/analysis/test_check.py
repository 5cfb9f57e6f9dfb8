"""Every code of the check has a spec that triggers it and one that does not; nothing is started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from unit.analysis.check_scenes import (
    BOTH,
    CASES,
    CORES,
    GPU_MEMORY,
    LOCAL,
    MEMORY,
    RANDOM,
    TABLE,
    Check,
    First,
    Missing,
    Noting,
    Scene,
    Second,
    Synchronising,
    WithGPUs,
    _Agreeing,
    _Demanding,
    _Local,
    _Rounding,
    own_metric,
    spec,
)

from isotrain.analysis.check import check as checking
from isotrain.analysis.check import codes_in_docs, machine_rules
from isotrain.analysis.check.check import check
from isotrain.analysis.check.codes import GROUPS, RULES
from isotrain.analysis.check.findings import CheckResult, result_text
from isotrain.analysis.check.rule import Severity
from isotrain.core.contracts.backend.group_hooks import LayerTrait, Trait
from isotrain.core.contracts.device_mesh import DeviceMesh
from isotrain.core.errors import (
    IsotrainError,
    PlanError,
    RunFailedError,
    SpecError,
)
from isotrain.core.plugins.manager import PluginManager
from isotrain.core.plugins.resolved_spec import ResolvedSpec
from isotrain.core.spec.loading import json_schema

PAGE = Path(__file__).parents[3] / "docs" / "check.md"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks a scene under adapters that never start."""
    host = PluginManager(entry_points=False)
    for adapter in (First, Synchronising, Second, Missing, WithGPUs, Noting):
        host.backends.add(adapter)
    host.models.add(TABLE, name="registered")
    for strategy in (_Local, _Agreeing, _Rounding, _Demanding):
        host.strategies.add(strategy)
    monkeypatch.setattr(checking, "plugin_manager", lambda of_spec: host)
    monkeypatch.setattr(machine_rules.hardware, "cores", lambda: CORES)
    monkeypatch.setattr(machine_rules.hardware, "memory_bytes", lambda: MEMORY)
    monkeypatch.setattr(machine_rules.hardware, "gpu_memory_bytes", lambda: GPU_MEMORY)

    def run(scene: Scene, **options: Any) -> CheckResult:
        def look(work: Any, cast: ResolvedSpec, backend: str) -> dict[str, Any]:
            assert not cast.spec.drop_remainder
            if scene.fails:
                raise RunFailedError("no such layer")
            traits = [{"trait": str(t), "layer": "dense/x", "kind": "X"} for t in scene.traits]
            model = {"weights": scene.weights, "fixed": 0, "slots": 2}
            seen = {"samples": scene.samples, "traits": traits, "model": model}
            seen |= {"fault": scene.fault, "refused": scene.refused, "notes": []}
            seen |= {"shared_weights": scene.shared_weights}
            seen |= {"teacher_weights": scene.teacher_weights}
            return {**seen, "refuses_single_sample": scene.refuses_single_sample}

        monkeypatch.setattr(checking, "probe_run", look)
        return check(
            spec(**scene.fields), backends=scene.backends, replicas=scene.replicas, **options
        )

    return run


def found(result: CheckResult) -> set[str]:
    return {finding.code for finding in result}


def test_every_code_has_a_case() -> None:
    assert list(CASES) == list(RULES)
    assert {rule.group for rule in RULES.values()} == set(GROUPS)


@pytest.mark.parametrize("code", CASES)
def test_each_code_has_a_spec_with_it_and_one_without(checked: Check, code: str) -> None:
    wrong, right = CASES[code]
    assert code in found(checked(wrong))
    assert code not in found(checked(right))


def test_too_little_memory_is_a_finding_with_a_strategy_that_fits(checked: Check) -> None:
    (told,) = [
        finding.detail for finding in checked(Scene(weights=(10, 10))) if finding.code == "ISO407"
    ]
    assert told.startswith("2 replicas take 1.49e-07 GiB, and this machine has 1.21e-07; ")
    assert told.endswith("--strategy sharded,stage=1 or sharded,stage=2 would fit")
    (none,) = [f.detail for f in checked(Scene(weights=(20, 20))) if f.targets == ("first@2",)]
    assert none.endswith("no strategy would fit")


def too_large(checked: Check, replicas: int, strategy: Any = None) -> list[str]:
    """What is told of runs on two GPUs, of which each is too small for the model and its training."""
    fields = {"strategy": strategy} if strategy else {}
    scene = Scene(fields, ("with-gpus",), replicas=(replicas,), weights=(20, 20))
    return [finding.detail for finding in checked(scene) if finding.code == "ISO407"]


def test_each_gpu_must_hold_its_replica(checked: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    assert too_large(checked, 2) == [
        "each GPU would have to hold 1.49e-07 GiB, and has 1.16e-07; --strategy sharded,stage=1 or"
        " sharded,stage=2 or sharded,stage=3 would fit (sharded,stage=3: weights are joined early)"
    ]
    (alone,) = too_large(checked, 1)
    assert alone.endswith("; --strategy pipeline,stages=2 would fit"), (
        "of four stages there are two"
    )
    hybrid = {"name": "sharded", "options": {"hybrid": True, "host_size": 1}}
    assert len(too_large(checked, 2, hybrid)) == 1, "each host has all slots"
    assert not too_large(checked, 2, {"name": "sharded", "options": {"stage": 1}})
    monkeypatch.setattr(machine_rules.hardware, "gpu_memory_bytes", lambda: None)
    assert not too_large(checked, 2)


def test_a_registered_model_is_checked_like_one_in_the_spec(checked: Check) -> None:
    assert "ISO106" in found(checked(Scene({"model": "registered"}, BOTH)))


def test_strategies_have_no_findings_with_one_replica(checked: Check) -> None:
    assert not found(checked(Scene({"strategy": "alone"}, replicas=(1,))))


def test_a_sound_spec_has_no_findings(checked: Check) -> None:
    result = checked(Scene(backends=BOTH))
    assert not len(result)
    assert result.targets == ("first@1", "first@2", "second@1", "second@2")
    words = "sound on first@1, first@2, second@1, second@2: nothing found\n"
    assert result_text(result) == words
    assert "nothing found" in result._repr_html_()


def test_a_finding_names_the_targets_it_holds_for(checked: Check) -> None:
    result = checked(Scene({"global_batch_size": 25}, BOTH, (1, 2, 3), traits=LOCAL))
    by_case = {(each.code, each.detail): each.targets for each in result}
    several = ("first@2", "first@3", "second@2", "second@3")
    assert by_case["ISO101", "1 layer"] == several
    assert by_case["ISO205", "25 samples over 2 replicas"] == ("first@2", "second@2")
    assert by_case["ISO205", "25 samples over 3 replicas"] == ("first@3", "second@3")


def test_findings_come_most_severe_first(checked: Check) -> None:
    fields = {"shuffle": False, "gradient_accumulation_steps": 13}
    result = checked(Scene(fields, ("missing", "first"), traits=LOCAL))
    order = [each.severity for each in result]
    assert order == sorted(order, key=list(Severity).index)
    assert {*order} == {*Severity}
    shown = result_text(result)
    assert shown.startswith("ISO401 error: the backend cannot be used here\n")
    assert shown.index("ISO101 warning") < shown.index("ISO214 note")
    assert "model  1 layer: dense/x (X)\n" in shown
    assert shown.endswith("1 error, 4 warnings, 3 notes\n")


@pytest.mark.parametrize("where", ["spec", "call"])
@pytest.mark.parametrize("given", ["ISO214", "ISO2"])
def test_a_code_or_its_group_is_silenced(checked: Check, where: str, given: str) -> None:
    fields: dict[str, Any] = {"shuffle": False}
    options: dict[str, Any] = {}
    if where == "spec":
        fields["ignore"] = [given]
    else:
        options["ignore"] = [given]
    result = checked(Scene(fields, traits=LOCAL), **options)
    assert found(result) == {"ISO101"}
    assert result.silenced == {"ISO214": 1}
    assert "silenced: ISO214" in result_text(result)


def test_an_unknown_code_is_an_error_with_the_nearest(checked: Check) -> None:
    with pytest.raises(PlanError, match=r"ignore: unknown code 'ISO299'\. Did you mean 'ISO"):
        checked(Scene(), ignore=["ISO299"])
    with pytest.raises(SpecError, match=r"ignore: unknown code 'ISO299'\. Did you mean 'ISO"):
        checked(Scene({"ignore": ["ISO299"]}))


@pytest.mark.parametrize("code", ["ISO999x", "iso214", "ISO21", 101])
def test_a_spec_refuses_malformed_codes(code: Any) -> None:
    with pytest.raises(SpecError, match=r"ignore.0: got .*expected a code of isotrain check"):
        spec(ignore=[code])
    with pytest.raises(SpecError, match="a list of codes"):
        spec(ignore="ISO101")


def test_the_schema_knows_the_form_of_codes() -> None:
    schema = json_schema()
    text = {"model": "a:b", "data": "a:b", "loss": "mse", "optimizer": "adam"}
    sound = {**text, "global_batch_size": 8, "epochs": 1, "ignore": ["ISO101", "ISO4"]}
    jsonschema.validate(sound, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**sound, "ignore": ["ISO21"]}, schema)


def test_the_result_is_json(checked: Check) -> None:
    result = checked(Scene({"shuffle": False, "ignore": ["ISO214"]}, traits=RANDOM))
    fields = json.loads(result.to_json())
    assert fields == json.loads(json.dumps(result.to_dict()))
    assert fields["format"] == 1
    assert fields["counts"] == {"error": 0, "warning": 1, "note": 0}
    assert fields["silenced"] == {"ISO214": 1}
    (finding,) = fields["findings"]
    assert finding["layers"] == ["dense/x (X)"]
    assert finding["targets"] == ["first@2"]
    assert finding["reason"] == RULES["ISO102"].reason


def test_a_notebook_shows_a_table(checked: Check) -> None:
    shown = checked(Scene({"metrics": [own_metric]}))._repr_html_()
    assert ">ISO302</td>" in shown
    assert "<table>" in shown
    assert "<lambda>" not in checked(Scene({"metrics": [lambda t, p: t]}))._repr_html_()


def test_what_needs_the_model_is_left_out_without_measuring(checked: Check) -> None:
    result = checked(Scene({"shuffle": False}, traits=LOCAL, fails=True), measure=False)
    assert found(result) == {"ISO214"}
    assert not result.measured
    assert "--no-measure" in result_text(result)


def test_a_failed_rule_is_reported_beside_the_findings(checked: Check) -> None:
    result = checked(Scene({"shuffle": False}, fails=True))
    assert found(result) == {"ISO502", "ISO214"}
    assert result.with_severity(Severity.ERROR)[0].detail == "no such layer"


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        (Scene(backends=("frst",)), "Did you mean 'first'"),
        (Scene(backends=("first:wir",)), "Did you mean 'wire'"),
        (Scene(backends=()), "at least one backend"),
        (Scene(replicas=(0,)), "at least 1"),
        (Scene({"strategy": "lone"}), "'alone'"),
    ],
)
def test_wrong_arguments_are_errors(checked: Check, scene: Scene, words: str) -> None:
    with pytest.raises(IsotrainError, match=words):
        checked(scene)


def test_long_lists_of_layers_are_shortened(checked: Check, monkeypatch: Any) -> None:
    scene = Scene(replicas=(2,))
    checked(scene)
    traits = [LayerTrait(Trait.RANDOM, f"drop{i}", "X").__dict__ for i in range(7)]
    seen = {"samples": 96, "traits": traits, "model": {"weights": ()}}
    seen |= {
        "fault": None,
        "refused": {},
        "notes": [],
        "refuses_single_sample": None,
        "shared_weights": (),
        "teacher_weights": (),
    }
    monkeypatch.setattr(checking, "probe_run", lambda *given: seen)
    (finding,) = check(spec(), backends="first", replicas=2)
    assert len(finding.layers) == 7
    assert finding.case.endswith("drop4 (X) and 2 more")


def test_the_page_has_every_code_as_declared() -> None:
    page = PAGE.read_text(encoding="utf-8")
    again = "python -m isotrain.analysis.check.codes_in_docs docs/check.md"
    assert codes_in_docs.updated(page) == page, again
    in_one_line = " ".join(page.split())
    for rule in RULES.values():
        assert rule.reason in in_one_line
        assert rule.fix in in_one_line


def test_stages_are_counted_against_cores(checked: Check) -> None:
    plan = SimpleNamespace(
        device="cpu", replicas=2, threads=1, device_mesh=DeviceMesh({"data": 2, "stage": CORES})
    )
    spec = SimpleNamespace(device="cpu")
    subject: Any = SimpleNamespace(targets=[SimpleNamespace(plan=plan, label="x")], spec=spec)
    (hit,) = machine_rules.devices(subject)
    assert (hit.code, hit.detail) == (
        "ISO404",
        f"{2 * CORES} processes of 2 replicas, {CORES} cores",
    )
