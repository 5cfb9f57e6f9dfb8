"""What a JobSet may hold, by the reference of its API: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/.

The Jobs in it are for the schemas of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jsonschema
import kubernetes_validate

_LABEL = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
_COUNT = {"type": "integer", "minimum": 0}
_NAMES = {"type": "array", "items": _LABEL}
_FLAG = {"type": "boolean"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Schema of an object with these properties and no others."""
    known = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**known, "required": [*required]}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


_RULE = _object(
    ("action",),
    name={"type": "string"},
    action=_one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons={"type": "array", "items": {"type": "string"}},
    targetReplicatedJobs=_NAMES,
)
_REPLICATED_JOB = _object(
    ("name", "template"),
    name=_LABEL,
    groupName=_LABEL,
    replicas=_COUNT,
    template={"type": "object"},
    dependsOn={
        "type": "array",
        "items": _object(("name", "status"), name=_LABEL, status=_one_of("Ready", "Complete")),
    },
)
_SPEC = _object(
    ("replicatedJobs",),
    replicatedJobs={"type": "array", "items": _REPLICATED_JOB, "minItems": 1},
    network=_object(enableDNSHostnames=_FLAG, subdomain=_LABEL, publishNotReadyAddresses=_FLAG),
    successPolicy=_object(
        ("operator",), operator=_one_of("All", "Any"), targetReplicatedJobs=_NAMES
    ),
    failurePolicy=_object(
        maxRestarts=_COUNT,
        restartStrategy=_one_of("Recreate", "BlockingRecreate"),
        rules={"type": "array", "items": _RULE},
    ),
    startupPolicy=_object(
        ("startupPolicyOrder",), startupPolicyOrder=_one_of("AnyOrder", "InOrder")
    ),
    suspend=_FLAG,
    coordinator=_object(("replicatedJob",), replicatedJob=_LABEL, jobIndex=_COUNT, podIndex=_COUNT),
    managedBy={"type": "string", "maxLength": 63},
    ttlSecondsAfterFinished=_COUNT,
)
SCHEMA = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata={"type": "object", "properties": {"name": _LABEL}, "required": ["name"]},
    spec=_SPEC,
)
"""Of the JobSet alone."""


def validate(part: Mapping[str, Any]) -> None:
    """Refuses a part of a manifest that the cluster would refuse.

    Raises:
        ValidationError: Of `jsonschema`; says what is wrong.
    """
    if part["kind"] != "JobSet":
        kubernetes_validate.validate(part, kubernetes_validate.latest_version(), strict=True)
        return
    jsonschema.validate(part, SCHEMA)
    for job in part["spec"]["replicatedJobs"]:
        validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job["template"]}
        )
