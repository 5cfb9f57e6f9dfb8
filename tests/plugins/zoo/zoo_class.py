"""A strategy that is itself the entry point."""

import isotrain


class OneClass(isotrain.Strategy):
    name = "zoo-class"
    summary = "an entry point without a hook"
    requires = frozenset()
    isotrain_api = "1"

    def step(self, group, batch, learning_rate):
        raise NotImplementedError
