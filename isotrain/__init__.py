"""isotrain: one training spec, any data-parallel backend, the same result."""

import isotrain._facade as _facade

__getattr__, __dir__, __all__ = _facade.of(__name__, __file__)
