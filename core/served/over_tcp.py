"""Served runs for a backend that has none of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isotrain.core.contracts.adapter import Adapter

if TYPE_CHECKING:
    from isotrain.core.contracts.group import ReplicaGroup
    from isotrain.core.contracts.plan import Setting
    from isotrain.core.contracts.service import Service
    from isotrain.core.spec.training_spec import TrainingSpec


class ServedOverTcp(Adapter):
    """An adapter whose served runs exchange messages over authenticated TCP.

    The coordinator holds the parameters and sends them to the workers. All of them use `start` with one
    replica.
    """

    served_over = "tcp"

    def start_served(self, spec: TrainingSpec, setting: Setting, service: Service) -> ReplicaGroup:
        from isotrain.core.served.group import served_by_tcp

        return served_by_tcp(service, lambda: self.start(spec, setting, service.alone()))

    def serve(self, spec: TrainingSpec, setting: Setting, service: Service) -> None:
        from isotrain.core.served.worker import serve

        serve(service, lambda: self.start(spec, setting, service.alone()))
