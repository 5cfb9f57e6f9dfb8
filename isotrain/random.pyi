"""The public names about random numbers, and where each is defined. They come from there on first use."""

from isotrain.core.contracts.backend.sample_draws import bernoulli as bernoulli
from isotrain.core.contracts.backend.sample_draws import dropout as dropout
from isotrain.core.contracts.backend.sample_draws import normal as normal
from isotrain.core.contracts.backend.sample_draws import uniform as uniform
