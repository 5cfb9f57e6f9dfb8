"""What authors of plugins build on; isotrain's own use exactly this."""

import isotrain._facade as _facade

__getattr__, __dir__, __all__ = _facade.of(__name__, __file__)
