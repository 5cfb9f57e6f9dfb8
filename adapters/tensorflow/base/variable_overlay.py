"""Variables of TensorFlow that are read and set as tensors, while a replica is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.base import private_api
from isotrain.plugin import SpecError


class VariableOverlay:
    """Has trained weights read only where they are given, and other variables set nowhere else."""

    def __init__(self, trained: Sequence[tf.Variable]) -> None:
        """Leaves them as they are for now.

        Args:
            trained: Of which this replica has parts.
        """
        self._trained = trained
        self._names = {id(variable): variable.name.rpartition(":")[0] for variable in trained}
        self._kinds: dict[type, type] = {}  # of variables, to those that are read and set here
        self._values: dict[int, tf.Tensor] = {}
        self._graph: Any = None

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Within it, trained weights cannot be read."""
        return self._replacing_classes(self._trained)

    @contextlib.contextmanager
    def given(
        self,
        trained: Mapping[int, tf.Tensor],
        others: Sequence[tf.Variable],
        values: Sequence[tf.Tensor],
    ) -> Iterator[None]:
        """Within it, a module computes with values, and trained weights cannot be read but for these.

        Args:
            trained: By the identities of weights.
            others: Other variables of the module.
            values: Of these; what it sets them to is had by `value`.
        """
        before, self._values = self._values, dict(trained)
        self._values |= {id(each): value for each, value in zip(others, values, strict=True)}
        graph, self._graph = self._graph, tf.compat.v1.get_default_graph()
        try:
            with self._replacing_classes([*self._trained, *others]):
                yield
        finally:
            self._values, self._graph = before, graph

    @contextlib.contextmanager
    def _replacing_classes(self, variables: Sequence[tf.Variable]) -> Iterator[None]:
        """Has variables read and set here, where they are not already."""
        known = set(self._kinds.values())
        variables = [variable for variable in variables if type(variable) not in known]
        kinds = [type(variable) for variable in variables]
        for variable, kind in zip(variables, kinds, strict=True):
            variable.__class__ = self._kind_of(kind)
        try:
            yield
        finally:
            for variable, kind in zip(variables, kinds, strict=True):
                variable.__class__ = kind

    def value(self, variable: tf.Variable) -> tf.Tensor:
        """What a variable is now.

        Raises:
            SpecError: It is a weight that is not given.
        """
        if id(variable) not in self._values:
            raise SpecError(
                f"strategy sharded: the weight {self._names[id(variable)]} is read past the module that it"
                " belongs to, or is joined with, and with stage=3 it is joined for that module alone. Read"
                " it where that is called, or take stage 1 or 2."
            )
        graph = tf.compat.v1.get_default_graph()
        while graph is not self._graph:
            if private_api.is_of_function(graph):
                raise SpecError(
                    f"strategy sharded: {variable.name} is read in a tf.function of its own, which is traced"
                    " once, and with stage=3 modules are computed again with other tensors. Leave the"
                    " decorator out, or take stage 1 or 2."
                )
            graph = graph.outer_graph
        return self._values[id(variable)]

    def set(self, variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
        """Gives a variable another value.

        Raises:
            SpecError: It is a trained weight, or is set where nobody can say how often.
        """
        if id(variable) in self._names:
            raise SpecError(
                f"strategy sharded: the trained weight {self._names[id(variable)]} is set in a forward pass,"
                " and with stage=3 no replica has all of it. Take stage 1 or 2."
            )
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise SpecError(
                f"strategy sharded: {variable.name} is set in a loop, a branch or a tf.function, and with"
                " stage=3 its module is computed again, and would set it a second time. Set it outside of"
                " that, or take stage 1 or 2."
            )
        self._values[id(variable)] = tf.stop_gradient(value)  # as nothing flows through variables
        return self._values[id(variable)]

    def _kind_of(self, own: type) -> type:
        """The class of variables of a class that are read and set here."""
        if own not in self._kinds:
            self._kinds[own] = type(own.__name__, (own,), self._methods())
        return self._kinds[own]

    def _methods(self) -> dict[str, Any]:
        def value(variable: tf.Variable) -> tf.Tensor:
            return self.value(variable)

        def sparse_read(variable: tf.Variable, indices: Any, name: str | None = None) -> tf.Tensor:
            return tf.gather(self.value(variable), indices, name=name)

        def gather_nd(variable: tf.Variable, indices: Any, name: str | None = None) -> tf.Tensor:
            return tf.gather_nd(self.value(variable), indices, name=name)

        def assign(variable: tf.Variable, value: Any, *_: Any, **__: Any) -> tf.Tensor:
            return self.set(variable, tf.convert_to_tensor(value, variable.dtype))

        def assign_add(variable: tf.Variable, delta: Any, *_: Any, **__: Any) -> tf.Tensor:
            return self.set(variable, self.value(variable) + delta)

        def assign_sub(variable: tf.Variable, delta: Any, *_: Any, **__: Any) -> tf.Tensor:
            return self.set(variable, self.value(variable) - delta)

        methods = (value, sparse_read, gather_nd, assign, assign_add, assign_sub)
        return {"read_value": value, **{each.__name__: each for each in methods}}
