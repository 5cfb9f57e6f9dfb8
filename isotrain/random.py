"""Random numbers by sample, for layers and objectives: the same for any number of replicas."""

import isotrain._lazy_exports as _lazy_exports

__getattr__, __dir__, __all__ = _lazy_exports.exports(__name__, __file__)
