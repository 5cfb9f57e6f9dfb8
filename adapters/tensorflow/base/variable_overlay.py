"""Variables whose reads and writes are redirected to tensors, while a replica is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from isotrain.adapters.tensorflow.base import private_api
from isotrain.plugin import SpecError


class VariableOverlay:
    """Redirects reads and writes of variables to tensors; trained weights are readable only if given."""

    def __init__(self, trained: Sequence[tf.Variable]) -> None:
        """Redirects nothing yet.

        Args:
            trained: Weights, of any shape, of which this replica has shards.
        """
        self._trained = trained
        self._names = {id(variable): variable.name.rpartition(":")[0] for variable in trained}
        self._redirecting_classes: dict[type, type] = {}  # class of variables -> its subclass
        self._values: dict[int, tf.Tensor] = {}
        self._graph: Any = None

    def forbid_reads(self) -> contextlib.AbstractContextManager[None]:
        """Context in which trained weights cannot be read."""
        return self._replacing_classes(self._trained)

    @contextlib.contextmanager
    def redirect(
        self,
        trained: Mapping[int, tf.Tensor],
        others: Sequence[tf.Variable],
        values: Sequence[tf.Tensor],
    ) -> Iterator[None]:
        """Context in which a module computes with tensors for its variables.

        Trained weights that are not given cannot be read.

        Args:
            trained: Tensors, of the weights' shapes and dtypes, by the identities of the weights.
            others: The module's other variables.
            values: Initial values of `others`; `value` returns what the module sets them to.
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
        """Context in which variables of any shape have the redirecting class, where they do not already."""
        redirecting = set(self._redirecting_classes.values())
        variables = [variable for variable in variables if type(variable) not in redirecting]
        classes = [type(variable) for variable in variables]
        for variable, cls in zip(variables, classes, strict=True):
            variable.__class__ = self._redirecting_class(cls)
        try:
            yield
        finally:
            for variable, cls in zip(variables, classes, strict=True):
                variable.__class__ = cls

    def value(self, variable: tf.Variable) -> tf.Tensor:
        """Current value of a variable, a tensor of its shape and dtype.

        Raises:
            SpecError: The variable is a weight that is not given.
        """
        if id(variable) not in self._values:
            raise SpecError(
                f"strategy sharded: the weight {self._names[id(variable)]} is read outside the module that it"
                " belongs to or is gathered with; with stage=3 it is gathered for that module alone. Read it"
                " inside that module's call, or use stage 1 or 2."
            )
        graph = tf.compat.v1.get_default_graph()
        while graph is not self._graph:
            if private_api.is_of_function(graph):
                raise SpecError(
                    f"strategy sharded: {variable.name} is read in a nested tf.function, which is traced only"
                    " once; with stage=3 modules are recomputed with other tensors. Remove the decorator, or"
                    " use stage 1 or 2."
                )
            graph = graph.outer_graph
        return self._values[id(variable)]

    def set(self, variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
        """Sets the value of a variable, a tensor of its shape and dtype.

        Raises:
            SpecError: The variable is a trained weight, or is set in a loop, a branch or a `tf.function`.
        """
        if id(variable) in self._names:
            raise SpecError(
                f"strategy sharded: the trained weight {self._names[id(variable)]} is set in a forward pass;"
                " with stage=3 no replica has all of it. Use stage 1 or 2."
            )
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise SpecError(
                f"strategy sharded: {variable.name} is set in a loop, a branch or a tf.function; with"
                " stage=3 its module is recomputed and would set it again. Set it outside of that, or use"
                " stage 1 or 2."
            )
        self._values[id(variable)] = tf.stop_gradient(value)  # as nothing flows through variables
        return self._values[id(variable)]

    def _redirecting_class(self, cls: type) -> type:
        """The redirecting subclass of a class of variables."""
        if cls not in self._redirecting_classes:
            self._redirecting_classes[cls] = type(cls.__name__, (cls,), self._methods())
        return self._redirecting_classes[cls]

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
