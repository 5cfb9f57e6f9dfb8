"""The API for authors of plugins; isotrain's own plugins use exactly this."""

import isotrain._lazy_exports as _lazy_exports

__getattr__, __dir__, __all__ = _lazy_exports.exports(__name__, __file__)
