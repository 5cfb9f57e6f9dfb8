"""What data are given by, besides arrays: files, streams, data sets by position."""

import isotrain._facade as _facade

__getattr__, __dir__, __all__ = _facade.of(__name__, __file__)
