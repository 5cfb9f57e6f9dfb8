"""SageMaker: the script of a training job, which is started once on each of its hosts.

By https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md it has `SM_HOSTS`,
a JSON list, and `SM_CURRENT_HOST`; `TRAINING_JOB_NAME` is the name of the job. In a job that requests MPI or
torchrun, the processes have the variables of that launcher too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from isotrain.plugin import ClusterEnvironment, ClusterInfo, ClusterInfoError, EnvReader


class SageMaker(ClusterEnvironment):
    """Reads the variables of the script of a training job."""

    name = "sagemaker"
    summary = "the script of a SageMaker training job, one on each host"

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        env = EnvReader(self.name, variables)
        if not env.all_set("SM_HOSTS", "SM_CURRENT_HOST"):
            return None
        hosts = _hosts(env.required_text("SM_HOSTS"))
        host = env.required_text("SM_CURRENT_HOST")
        if host not in hosts:
            raise ClusterInfoError(
                f"sagemaker: SM_CURRENT_HOST is {host!r}; expected one of SM_HOSTS: {', '.join(hosts)}."
            )
        return ClusterInfo(
            environment=self.name,
            rank=hosts.index(host),
            world_size=len(hosts),
            job=env.text("TRAINING_JOB_NAME") or self.name,
            local_rank=0,
            local_world_size=1,
            node_rank=hosts.index(host),
            host=host,
            hosts=tuple(hosts),
            coordinator=hosts[0],
            variables_read=env.variables_read,
        )


def _hosts(text: str) -> list[str]:
    try:
        return [str(host) for host in json.loads(text)]
    except (ValueError, TypeError) as error:
        raise ClusterInfoError(
            f"sagemaker: SM_HOSTS is {text!r}; expected a JSON list of hosts."
        ) from error
