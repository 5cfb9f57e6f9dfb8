"""`TF_CONFIG`: what TensorFlow's strategies read, set by a person, a script, or Kubeflow's TFJob.

By https://www.tensorflow.org/guide/distributed_training#TF_CONFIG it is a JSON text: `cluster` lists
addresses by kind of task, and `task` says of which kind this process is, and which of them. Chief and
workers train; the chief, where there is one, comes first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.environments.nesting import STARTERS
from isotrain.plugin import ClusterEnvironment, ClusterInfo, ClusterInfoError, EnvReader

VARIABLE = "TF_CONFIG"
_TRAINING = ("chief", "master", "worker")
_FORM = (
    'expected such as {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type":'
    ' "worker", "index": 0}}'
)


class TFConfig(ClusterEnvironment):
    """Reads `TF_CONFIG`."""

    name = "tf_config"
    summary = "a chief or worker by TF_CONFIG"
    nested_in = STARTERS

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        text = EnvReader(self.name, variables).text(VARIABLE)
        if text is None:
            return None
        try:
            config = json.loads(text)
            cluster, task = config.get("cluster") or {}, config.get("task") or {}
            if not cluster:
                return None
            addresses = {kind: list(map(_parts, cluster[kind])) for kind in cluster}
            return _place(addresses, str(task["type"]), int(task["index"]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ClusterInfoError(
                f"tf_config: {VARIABLE} is {text!r} ({error!r}); {_FORM}."
            ) from error


def _place(
    addresses: Mapping[str, Sequence[tuple[str, int]]], kind: str, index: int
) -> ClusterInfo:
    if kind not in _TRAINING:
        raise ClusterInfoError(
            f"tf_config: {VARIABLE} says that this process is a {kind!r}; expected {' or '.join(_TRAINING)}."
            " Parameter servers and evaluators are isotrain's own matter: leave them out of the cluster."
        )
    everyone = [(each, at) for each in _TRAINING for at in addresses.get(each, ())]
    host = addresses[kind][index][0]
    before = sum(len(addresses.get(each, ())) for each in _TRAINING[: _TRAINING.index(kind)])
    hosts = list(dict.fromkeys(each for _, (each, _) in everyone))
    rank, (first, first_port) = before + index, everyone[0][1]
    return ClusterInfo(
        environment=TFConfig.name,
        rank=rank,
        world_size=len(everyone),
        job=f"{first}:{first_port}",
        local_rank=sum(each == host for _, (each, _) in everyone[:rank]),
        local_world_size=sum(each == host for _, (each, _) in everyone),
        node_rank=hosts.index(host),
        host=host,
        hosts=tuple(hosts),
        coordinator=first,
        port=first_port,
        variables_read=(VARIABLE,),
    )


def _parts(address: Any) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
