"""Kubernetes: an Indexed Job, or a JobSet, with one rank in each pod."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import Any, Literal

import yaml

from isotrain.plugin import (
    Allocation,
    Availability,
    HostSlots,
    PlanError,
    RankCommand,
    SchedulerLauncher,
    Submission,
)

_PROGRAM = (sys.executable, "-m", "isotrain.launchers.kubernetes_main")
_MANIFEST = "job.yaml"
_MOUNT = "/isotrain"
_SPEC = "spec.json"
_RUNS = "/runs"
_TLS = "/tls"
_TLS_VARIABLE = "ISOTRAIN_TLS"
_READABLE_BY_OWNERS = 0o440
_JOB = "ranks"
"""The name of the one Job in a JobSet."""


class KubernetesLauncher(SchedulerLauncher):
    """Starts the ranks as pods of a Job by `kubectl`, and follows the pod of rank 0.

    The spec is in a ConfigMap, the key in a Secret.
    """

    name = "kubernetes"
    summary = "pods of an Indexed Job or a JobSet, by kubectl"

    def __init__(
        self,
        image: str = "",
        pods: int | None = None,
        gpus: int = 0,
        kind: Literal["job", "jobset"] = "job",
        volume: str = "",
        tls: str = "",
        kubectl: str = "kubectl",
    ) -> None:
        """Keeps the options.

        Args:
            image: Image with isotrain, the backend's packages and the modules that the spec names.
            pods: Number of pods, each of which is a rank; left out: as many as the requested replicas take,
                else 1.
            gpus: NVIDIA GPUs of each pod.
            kind: `job`, or `jobset` in clusters with the JobSet controller.
            volume: PersistentVolumeClaim for run directories, mounted at /runs in each pod; left out: run
                directories are deleted with the pods.
            tls: Secret with `ca.crt`, `tls.crt` and `tls.key`, to encrypt the connections between ranks;
                left out: no encryption.
            kubectl: Command with options: `kubectl --context lab --namespace me`.
        """
        if kind not in ("job", "jobset"):
            raise PlanError(f"kubernetes: kind: expected job or jobset, received {kind!r}.")
        self._image = image
        self._requested_pods = pods
        self._pods = pods or 1
        self._gpus = gpus
        self._kind = kind
        self._volume = volume
        self._tls = tls
        self._kubectl = shlex.split(kubectl)

    def availability(self) -> Availability:
        if shutil.which(self._kubectl[0]) is None:
            hint = "install kubectl, or use it with the manifest on another machine"
            return Availability(False, None, f"there is no {self._kubectl[0]}", hint)
        return Availability(True)

    def allocation(self) -> Allocation:
        return Allocation((HostSlots(1, devices=self._gpus),) * self._pods)

    def options_for(self, processes: int) -> Mapping[str, Any]:
        return {} if self._requested_pods else {"pods": processes}

    def without(self, host: str) -> Mapping[str, Any]:
        if self._pods == 1:
            raise PlanError(f"kubernetes: no pod is left without {host}.")
        return {"pods": self._pods - 1}  # new pods are scheduled on the remaining hosts

    def submission(self, command: RankCommand) -> Submission:
        if not self._image:
            raise PlanError("kubernetes: image: name the image of the pods.")
        if _TLS_VARIABLE in command.variables and not self._tls:
            raise PlanError(
                f"kubernetes: tls: {_TLS_VARIABLE} is set here, to a folder that pods do not have. Name the"
                " Secret that has its files with tls=SECRET, or unset it."
            )
        parts = [_secret(command), _config_map(command)]
        job = command.name
        if self._kind == "job":
            parts += [_service(command.name), self._job(command)]
        else:
            parts += [self._job_set(command)]
            job = f"{command.name}-{_JOB}-0"
        manifest = ("--manifest", str(command.spec.with_name(_MANIFEST)), "--job", job)
        follow = (*_PROGRAM, "--kubectl", shlex.join(self._kubectl), *manifest)
        files = {_MANIFEST: yaml.safe_dump_all(parts, sort_keys=False)}
        create = {_MANIFEST: (*self._kubectl, "create", "-f")}
        return Submission((follow,), files=files, key_in_environment=False, submit_with=create)

    def _job(self, command: RankCommand) -> dict[str, Any]:
        name = command.name
        variables = {
            "JOB_COORDINATOR": f"{name}-0.{name}",
            "JOB_UID": _label("batch.kubernetes.io/controller-uid"),
        }
        pod = {"subdomain": name, **self._pod(command, variables)}
        return _object("batch/v1", "Job", name, spec=self._indexed(pod))

    def _job_set(self, command: RankCommand) -> dict[str, Any]:
        name = command.name
        variables = {
            "JOB_COORDINATOR": f"{name}-{_JOB}-0-0.{name}",
            "JOB_UID": _label("jobset.sigs.k8s.io/jobset-uid"),
            "JOBSET_RESTARTS": _label("jobset.sigs.k8s.io/restart-attempt"),
        }
        job = {"spec": self._indexed(self._pod(command, variables))}
        jobs = [{"name": _JOB, "replicas": 1, "template": job}]
        network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
        spec = {"network": network, "failurePolicy": {"maxRestarts": 0}, "replicatedJobs": jobs}
        return _object("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec=spec)

    def _indexed(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """Spec of an Indexed Job; a pod that fails ends the others."""
        count = {"completions": self._pods, "parallelism": self._pods}
        return {
            "completionMode": "Indexed",
            **count,
            "backoffLimit": 0,
            "template": {"spec": pod},
        }

    def _pod(self, command: RankCommand, job_variables: Mapping[str, Any]) -> dict[str, Any]:
        key = {"valueFrom": {"secretKeyRef": {"name": command.name, "key": "key"}}}
        variables: dict[str, Any] = {
            name: text for name, text in command.variables.items() if name.startswith("ISOTRAIN_")
        }
        if self._tls:
            variables[_TLS_VARIABLE] = _TLS
        variables |= {"JOB_COMPLETIONS": str(self._pods), **job_variables}
        run = command.on_host("python", f"{_MOUNT}/{_SPEC}", f"{_RUNS}/{command.name}")
        container: dict[str, Any] = {
            "name": "rank",
            "image": self._image,
            "command": list(run),
            "env": [
                *(_variable(*each) for each in variables.items()),
                {"name": command.key_variable, **key},
            ],
            "volumeMounts": [
                {"name": name, "mountPath": path} for name, path, _ in self._volumes(command)
            ],
        }
        if self._gpus:
            container["resources"] = {"limits": {"nvidia.com/gpu": self._gpus}}
        return {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": name, **source} for name, _, source in self._volumes(command)],
        }

    def _volumes(self, command: RankCommand) -> list[tuple[str, str, dict[str, Any]]]:
        """Name, mount path and source of each volume."""
        volumes = [
            ("spec", _MOUNT, {"configMap": {"name": command.name}}),
            ("runs", _RUNS, self._runs_source()),
        ]
        if self._tls:
            secret = {"secretName": self._tls, "defaultMode": _READABLE_BY_OWNERS}
            volumes.append(("tls", _TLS, {"secret": secret}))
        return volumes

    def _runs_source(self) -> dict[str, Any]:
        if self._volume:
            return {"persistentVolumeClaim": {"claimName": self._volume}}
        return {"emptyDir": {}}


def _object(version: str, kind: str, name: str, **parts: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **parts}


def _secret(command: RankCommand) -> dict[str, Any]:
    return _object("v1", "Secret", command.name, stringData={"key": command.key})


def _config_map(command: RankCommand) -> dict[str, Any]:
    return _object("v1", "ConfigMap", command.name, data={_SPEC: command.spec_text})


def _service(name: str) -> dict[str, Any]:
    """Headless service: a DNS name for each pod, before it is ready too, as its rendezvous comes first."""
    selected = {"batch.kubernetes.io/job-name": name}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selected}
    return _object("v1", "Service", name, spec=spec)


def _label(name: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": f"metadata.labels['{name}']"}}


def _variable(name: str, value: str | dict[str, Any]) -> dict[str, Any]:
    source = {"value": value} if isinstance(value, str) else {"valueFrom": value}
    return {"name": name, **source}
