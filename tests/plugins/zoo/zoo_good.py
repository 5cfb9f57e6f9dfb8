"""A sound plugin: a strategy, a model, loggers and an event hook."""

import os

import isotrain
from isotrain import Capability

isotrain_api = "1.0"


class Native(isotrain.Strategy):
    """The backend's own synchronised step; says in each process that it was here."""

    name = "zoo-native"
    summary = "the backend's own step"
    requires = frozenset({Capability.SYNCHRONOUS_STEP})

    def started(self, group):
        print("zoo-native is here", flush=True)

    def step(self, group, batch, learning_rate):
        return group.synchronous_step(batch, learning_rate)


class Failing(isotrain.Logger):
    """A logger that breaks on the way."""

    name = "zoo-failing"
    summary = "breaks"

    def steps_done(self, first_step, losses, learning_rates):
        raise OSError("no room left")


@isotrain.hookimpl
def isotrain_register_strategies(register):
    register.add(Native)
    register.add("zoo_lazy:Lazy", name="zoo-lazy")


@isotrain.hookimpl
def isotrain_register_models(register):
    register.add("zoo_lazy:line", name="zoo-line")


@isotrain.hookimpl
def isotrain_register_loggers(register):
    register.add(Failing)


@isotrain.hookimpl
def isotrain_run_finished(result):
    if "ZOO_FILE" in os.environ:
        with open(os.environ["ZOO_FILE"], "w", encoding="utf-8") as stream:
            stream.write(result["plan"]["strategy"])
