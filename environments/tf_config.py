"""`TF_CONFIG`: the variable of TensorFlow's strategies, set by hand, by a script, or by Kubeflow's TFJob.

By https://www.tensorflow.org/guide/distributed_training#TF_CONFIG it is a JSON text: `cluster` lists
addresses by task type, and `task` has the type and index of this process. Chief and workers train; the
chief, if there is one, is rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from isotrain.environments.nesting import OUTER_LAUNCHERS
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
    nested_in = OUTER_LAUNCHERS

    def cluster_info(self, variables: Mapping[str, str]) -> ClusterInfo | None:
        text = EnvReader(self.name, variables).text(VARIABLE)
        if text is None:
            return None
        try:
            config = json.loads(text)
            cluster, task = config.get("cluster") or {}, config.get("task") or {}
            if not cluster:
                return None
            addresses = {kind: list(map(_host_and_port, cluster[kind])) for kind in cluster}
            return _cluster_info(addresses, str(task["type"]), int(task["index"]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ClusterInfoError(
                f"tf_config: {VARIABLE} is {text!r} ({error!r}); {_FORM}."
            ) from error


def _cluster_info(
    addresses: Mapping[str, Sequence[tuple[str, int]]], task_type: str, index: int
) -> ClusterInfo:
    if task_type not in _TRAINING:
        raise ClusterInfoError(
            f"tf_config: {VARIABLE} says that this process is a {task_type!r}; expected"
            f" {' or '.join(_TRAINING)}. isotrain starts parameter servers and evaluates itself: leave these"
            " tasks out of the cluster."
        )
    by_rank = [address for each in _TRAINING for address in addresses.get(each, ())]
    host = addresses[task_type][index][0]
    earlier_types = _TRAINING[: _TRAINING.index(task_type)]
    rank = sum(len(addresses.get(each, ())) for each in earlier_types) + index
    hosts = list(dict.fromkeys(each for each, _ in by_rank))
    first, first_port = by_rank[0]
    return ClusterInfo(
        environment=TFConfig.name,
        rank=rank,
        world_size=len(by_rank),
        job=f"{first}:{first_port}",
        local_rank=sum(each == host for each, _ in by_rank[:rank]),
        local_world_size=sum(each == host for each, _ in by_rank),
        node_rank=hosts.index(host),
        host=host,
        hosts=tuple(hosts),
        coordinator=first,
        port=first_port,
        variables_read=(VARIABLE,),
    )


def _host_and_port(address: Any) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
