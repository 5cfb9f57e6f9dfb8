"""The backend keeps the promises: the whole conformance kit."""

from isotrain.testing.pytest_suite import backend_suite

TestJaxMesh = backend_suite("jax-mesh", replicas=[2])
