"""Registers the built-in strategies, by the same hook as third-party plugins."""

from __future__ import annotations

from isotrain.plugin import StrategyRegistry, hookimpl


@hookimpl
def isotrain_register_strategies(register: StrategyRegistry) -> None:
    """Registers each strategy by import string, so that none is imported before it is used."""
    register.add("isotrain.strategies.data_parallel:DataParallel", name="data-parallel")
    register.add("isotrain.strategies.local_sgd:LocalSGD", name="local-sgd")
    register.add("isotrain.strategies.diloco:DiLoCo", name="diloco")
    register.add("isotrain.strategies.gossip:Gossip", name="gossip")
    register.add("isotrain.strategies.compressed:Compressed", name="compressed")
    register.add("isotrain.strategies.hierarchical:Hierarchical", name="hierarchical")
    register.add("isotrain.strategies.parameter_server:ParameterServer", name="parameter-server")
    register.add("isotrain.strategies.elastic_averaging:ElasticAveraging", name="elastic-averaging")
    register.add("isotrain.strategies.sharded:Sharded", name="sharded")
    register.add("isotrain.strategies.pipeline:Pipeline", name="pipeline")
    register.add("isotrain.strategies.tensor:TensorParallel", name="tensor")
