"""The conformance kit: does a backend or a strategy keep the promises? See `docs/testing.md`."""
