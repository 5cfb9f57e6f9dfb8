"""The launcher `kubernetes`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from typing import Any

import pytest
import yaml
from unit.launchers.rank_command import COMMAND, KEY

from isotrain.core.errors import PlanError
from isotrain.launchers.kubernetes import KubernetesLauncher


class TestKubernetes:
    def manifest(self, **options: Any) -> dict[str, dict[str, Any]]:
        launcher = KubernetesLauncher(image="me/train:1", pods=4, **options)
        text = launcher.submission(COMMAND).files["job.yaml"]
        return {part["kind"]: part for part in yaml.safe_load_all(text)}

    def test_pods_have_the_variables_of_their_rank(self) -> None:
        found = self.manifest(gpus=1)
        job = found["Job"]["spec"]
        assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (4, 4, 0)
        pod = job["template"]["spec"]
        (container,) = pod["containers"]
        variables = {each["name"]: each for each in container["env"]}
        assert variables["JOB_COMPLETIONS"]["value"] == "4"
        assert variables["JOB_COORDINATOR"]["value"] == "isotrain-digits-0.isotrain-digits"
        assert pod["subdomain"] == found["Service"]["metadata"]["name"] == "isotrain-digits"
        assert variables["ISOTRAIN_KEY"]["valueFrom"]["secretKeyRef"]["name"] == "isotrain-digits"
        assert found["Secret"]["stringData"] == {"key": KEY}
        assert found["ConfigMap"]["data"] == {"spec.json": COMMAND.spec_text}
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
        assert container["command"][:5] == [
            "python",
            "-m",
            "isotrain",
            "run",
            "/isotrain/spec.json",
        ]

    def test_a_lost_pod_is_left_out(self) -> None:
        assert KubernetesLauncher("me/train:1", pods=4).without("a-pod") == {"pods": 3}
        with pytest.raises(PlanError, match="no pod is left without a-pod"):
            KubernetesLauncher("me/train:1").without("a-pod")

    def test_the_first_pod_of_a_job_set_is_the_coordinator(self) -> None:
        found = self.manifest(kind="jobset", volume="kept")
        assert "Service" not in found
        (job,) = found["JobSet"]["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
        variables = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
        assert variables["JOB_COORDINATOR"] == "isotrain-digits-ranks-0-0.isotrain-digits"
        assert {"name": "runs", "persistentVolumeClaim": {"claimName": "kept"}} in pod["volumes"]

    @pytest.mark.parametrize(("kind", "job"), [("job", ""), ("jobset", "-ranks-0")])
    def test_the_job_of_the_first_pod_is_followed(self, kind: Any, job: str) -> None:
        launcher = KubernetesLauncher("me/train:1", kind=kind, kubectl="kubectl -n 'a b'")
        found = launcher.submission(COMMAND)
        ((*_, kubectl, _, manifest, _, followed),) = found.commands
        assert shlex.split(kubectl) == ["kubectl", "-n", "a b"]
        assert (manifest, followed) == (
            "/shared/a run/launcher/job.yaml",
            f"isotrain-digits{job}",
        )
        assert not found.key_in_environment
        assert KEY not in json.dumps(found.commands)

    def test_a_missing_kubectl_is_named(self) -> None:
        found = KubernetesLauncher(kubectl="no-such-kubectl").availability()
        assert (found.available, found.reason) == (False, "there is no no-such-kubectl")

    def test_the_local_certificate_folder_is_not_sent_to_pods(self) -> None:
        command = dataclasses.replace(COMMAND, variables={"ISOTRAIN_TLS": "/of/this/machine"})
        with pytest.raises(PlanError, match="tls: ISOTRAIN_TLS is set here"):
            KubernetesLauncher("me/train:1").submission(command)

    def test_options_that_make_no_manifest_are_refused(self) -> None:
        with pytest.raises(PlanError, match="image: name the image"):
            KubernetesLauncher().submission(COMMAND)
        with pytest.raises(PlanError, match="expected job or jobset, received 'pod'"):
            KubernetesLauncher(kind="pod")  # type: ignore[arg-type]

    @pytest.mark.parametrize("here", [{}, {"ISOTRAIN_TLS": "/of/this/machine"}])
    def test_pods_get_certificates_from_a_secret(self, here: dict[str, str]) -> None:
        command = dataclasses.replace(COMMAND, variables=here)
        launcher = KubernetesLauncher(image="me/train:1", pods=4, tls="certificates")
        job = list(yaml.safe_load_all(launcher.submission(command).files["job.yaml"]))[-1]
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        told = [each["value"] for each in container["env"] if each["name"] == "ISOTRAIN_TLS"]
        (mounted,) = (each for each in container["volumeMounts"] if each["mountPath"] == told[0])
        (volume,) = (each for each in pod["volumes"] if each["name"] == mounted["name"])
        assert told == ["/tls"]
        assert volume["secret"] == {"secretName": "certificates", "defaultMode": 0o440}
