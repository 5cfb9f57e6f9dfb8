# Every target first brings the environment `.venv` up to date (tools/setup_environment.py): minutes the first
# time, an instant afterwards. Another Python: PYTHON=python3.12 make demo. Without Horovod: make environment HOROVOD=0

VENV_PYTHON := .venv/bin/python
OLD_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# The Python that does the set-up: the environment's own where there is one, else the first that is new enough.
PYTHON ?= $(shell for p in $(VENV_PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '$(OLD_ENOUGH)' 2>/dev/null && echo $$p && exit; done; echo python3)

.DEFAULT_GOAL := help
.PHONY: help environment demo test test-quick test-features test-exhaustive test-failures test-examples test-kernels test-launchers test-nccl test-oldest lint format docs benchmark dist release clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' Makefile | expand -t 24

environment: ## only the set-up; HOROVOD=0 leaves Horovod and its compiler out, TOOLS=0 the tools for working on isotrain
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer with venv \
	(Debian, Ubuntu: sudo apt install python3 python3-venv)" >&2; exit 1; }
	@$(PYTHON) tools/setup_environment.py

# Without a Horovod yet, torch and TensorFlow come first; it is compiled after that, and added to the same report.
demo: ## train the digits under every backend and compare the results
	@$(MAKE) --no-print-directory environment HOROVOD=0 TOOLS=0
	$(VENV_PYTHON) examples/demo.py
	@[ "$(HOROVOD)" = 0 ] || $(VENV_PYTHON) -c "import horovod" 2>/dev/null || \
	{ nice $(MAKE) --no-print-directory environment HOROVOD=1 TOOLS=0 && $(VENV_PYTHON) examples/demo.py --resume; }

# Three files of tests at a time, where two cores serve: most tests start processes and wait for them. A file stays together,
# for its tests share runs; the order is that of tests/conftest.py, the longest first. Hundreds of processes import isotrain: it is compiled once.
BY_FILE := --dist loadfile --no-loadscope-reorder
PYTEST := PYTHONDONTWRITEBYTECODE= $(VENV_PYTHON) -m pytest --numprocesses 3 $(BY_FILE)

PROMISES := not features and not failures and not examples and not nccl

test: environment ## the tests, but for those of the tiers below
	$(PYTEST) tests -m "$(PROMISES)"

test-quick: environment ## the everyday tests: the quick part of these
	$(PYTEST) tests -m "not slow and $(PROMISES)"

# Only the files that have such tests are collected.
FEATURE_TESTS = -m "features and not exhaustive and not failures and not examples" $(shell grep -rlE --include="test_*.py" "mark\.features|features=" tests)

test-features: environment ## tests of single features on one more backend each, and with other libraries and programs
	$(PYTEST) $(FEATURE_TESTS)

EXHAUSTIVE_TESTS = -m "exhaustive and not failures" $(shell grep -rlE --include="test_*.py" "mark\.features|features=|mark\.examples" tests)

test-exhaustive: environment ## features and examples on all other backends, and in more combinations: before a release
	$(PYTEST) $(EXHAUSTIVE_TESTS)

FAILURE_TESTS = -m "failures and not examples" $(shell grep -rl --include="test_*.py" "mark\.failures" tests)

test-failures: environment ## tests in which processes are killed, hang or are lost: further kinds, and every backend
	$(PYTEST) $(FAILURE_TESTS)

EXAMPLE_TESTS = -m "examples and not exhaustive" $(shell grep -rl --include="test_*.py" "mark\.examples" tests)

test-examples: environment ## tests that train the examples, run the benchmarks, and install packages of plugins
	$(PYTEST) $(EXAMPLE_TESTS)

# Whoever compares bits compares those of a library's kernels, which it chooses by the machine: other machines have others.
# MKL may round by the alignment of memory, as its kernels for SSE do in float64, unless MKL_CBWR says otherwise.
# Tests of bfloat16 on TensorFlow cannot take part: it asks the processor what oneDNN has, and aborts where that is told less.
KERNELS_OF_AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 MKL_CBWR=COMPATIBLE \
	OPENBLAS_CORETYPE=Haswell ISOTRAIN_TEST_THREADS=1
KERNELS_OF_SSE := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_CBWR=COMPATIBLE \
	OPENBLAS_CORETYPE=Nehalem ISOTRAIN_TEST_THREADS=2

KERNEL_TESTS = -m kernels $(shell grep -rl --include="test_*.py" "mark\.kernels" tests)

test-kernels: environment ## tests that compare bits, with the matrix kernels of other machines
	$(KERNELS_OF_AVX2) $(PYTEST) $(KERNEL_TESTS)
	$(KERNELS_OF_SSE) $(PYTEST) $(KERNEL_TESTS)

test-launchers: environment ## runs under real schedulers and launchers, on hosts that are namespaces: takes root, and installs them
	$(VENV_PYTHON) tools/setup_launchers.py
	.venv-launchers/bin/python -m pytest --numprocesses 2 $(BY_FILE) tests/launchers

test-nccl: .venv-nccl/complete ## Horovod with NCCL for TensorFlow, as far as it goes without a GPU: takes CUDA's compiler
	.venv-nccl/bin/python -m pytest -m nccl tests/integration/test_horovod_nccl.py

.venv-nccl/complete: tools/build_horovod/horovod-0.28.1-gpu.patch
	$(PYTHON) -m venv .venv-nccl
	.venv-nccl/bin/pip install --quiet --constraint constraints.txt --editable '.[tensorflow,report]' hypothesis pytest \
	pytest-timeout pytest-xdist cmake cffi packaging wheel 'setuptools<81' nvidia-nccl-cu13
	HOROVOD_GPU_OPERATIONS=NCCL .venv-nccl/bin/python -m isotrain.build_horovod
	touch $@

test-oldest: .venv-oldest/complete ## the conformance kit with the oldest TensorFlow and Keras that may be installed
	for backend in torch-ddp tf-mirrored tf-multiworker; do .venv-oldest/bin/isotrain conformance $$backend || exit; done

.venv-oldest/complete: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet 'tensorflow-cpu==2.18.0' 'keras==3.10.0' 'torch==2.13.0' --editable '.[testing]'
	touch $@

lint: environment ## style, types, and who imports whom
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	$(VENV_PYTHON) -m mypy
	.venv/bin/lint-imports

format: environment ## rewrite the sources in the project's style
	$(VENV_PYTHON) -m ruff check --fix
	$(VENV_PYTHON) -m ruff format

docs: .venv-docs/complete ## the documentation as a site, in site/; only the first time needs a network
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/complete: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --constraint constraints.txt pip
	.venv-docs/bin/pip install --quiet --constraint constraints.txt --editable . --group docs
	touch $@

benchmark: environment ## isotrain beside what people would run instead: hours
	test -e .venv-peers/complete || $(VENV_PYTHON) -m benchmarks.peers --setup
	$(VENV_PYTHON) -m benchmarks.peers

dist: export ISOTRAIN_URL = $(URL)
dist: environment ## the source distribution and the wheel, in dist/; URL=https://... says where the project lives
	rm -rf dist
	$(VENV_PYTHON) -c "from setuptools import build_meta; build_meta.build_sdist('dist')"
	$(VENV_PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz

VERSION = $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)

release: ## what continuous integration runs and `test-exhaustive`, then dist/ and a tag of the version in pyproject.toml: URL=https://... make release
	@test -n '$(URL)' || { echo 'release: URL=https://... of the repository is missing' >&2; exit 1; }
	test -z "$$(git status --porcelain)"
	grep -q '^## \[$(VERSION)\]' CHANGELOG.md
	.ci/run
	$(MAKE) test-exhaustive
	$(MAKE) dist
	git tag 'v$(VERSION)'

clean: ## remove the environment and every generated file; the cached Horovod wheel stays
	rm -rf .venv .venv-docs .venv-launchers .venv-nccl .venv-oldest .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site isotrain.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
