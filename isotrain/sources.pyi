"""The public names about data, and where each is defined. They are imported from there on first use."""

from isotrain.core.data.sources import ArraySource as ArraySource
from isotrain.core.data.sources import BatchIndexed as BatchIndexed
from isotrain.core.data.sources import MapStyle as MapStyle
from isotrain.core.data.sources import ShardedStream as ShardedStream
from isotrain.core.data.sources import Source as Source
from isotrain.core.data.sources import Weighted as Weighted
from isotrain.core.data.sources import arrays as arrays
from isotrain.core.data.sources import as_source as as_source
from isotrain.core.data.sources import joined as joined
from isotrain.core.data.sources import mixture as mixture
from isotrain.core.data.sources import npy as npy
from isotrain.core.data.sources import npz as npz
from isotrain.core.data.sources import sample_stream as sample_stream
from isotrain.core.data.sources import stream as stream
