PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
# Compilers for other devices: never in the environment of the suite, which must not depend on them.
TARGETS_VENV ?= .venv-targets
TARGETS_STAMP := $(TARGETS_VENV)/.installed
# The newest supported JAX, if there is a Python for it.
TARGETS_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) $(PYTHON))
# Several times as fast as pip. Modules are compiled at once: a process may not be allowed to keep what it compiled.
INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
# Tests start many programs: what one has compiled is kept for the others, also where the environment says not to.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: help demo test suite test-full test-all test-targets targets lint docs walk-through dist bench lock clean

help:  ## This list.
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "%-14s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUNS)  ## Tune flash attention on this machine's device and print what became of every candidate.
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## Lint and the CPU suite, at the same time.
	$(MAKE) --no-print-directory --jobs 2 lint suite

suite: $(STAMP)  ## The CPU suite, without the whole products of cases.
	$(PYTEST) -n 2 -m "not gpu and not tpu and not targets and not full"

test-full: $(STAMP)  ## The CPU suite with the whole products of cases.
	$(PYTEST) -n 2 -m "not gpu and not tpu and not targets"

test-all:  ## The suite on every supported Python that is installed.
	./scripts/test-all

test-targets: $(TARGETS_STAMP)  ## Compile every backend for TPUs and GPUs that are not here.
	JAX_PLATFORMS=cpu $(TARGETS_VENV)/bin/python -m pytest -n 2 -m targets tests/targets

targets: $(TARGETS_STAMP)  ## The table of what compiles for which device, in docs/targets.md and benchmarks/results/.
	JAX_PLATFORMS=cpu $(TARGETS_VENV)/bin/python -m benchmarks.targets

lint: docs $(STAMP)  ## Style, types, and the docs with warnings as errors.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python

docs: $(STAMP)  ## The docs as a site, in site/.
	# Not --quiet: then warnings are not counted, and so no errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(STAMP)  ## A wheel and a source distribution, in dist/.
	$(BIN)/hatchling build

walk-through: $(STAMP)  ## Follow the README and the tutorial literally, in a fresh clone and a fresh environment.
	./scripts/walk-through $(PYTHON)

bench: $(STAMP)  ## Every CPU benchmark, as ratios in one run.
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python -m benchmarks.lowering
	$(BIN)/python benchmarks/store.py
	$(BIN)/python benchmarks/devices.py
	$(BIN)/python -m benchmarks.racing
	$(BIN)/python benchmarks/tuning.py
	$(BIN)/python -m benchmarks.operation flash_attention
	$(BIN)/python -m benchmarks.operation rms_norm
	$(BIN)/python -m benchmarks.operation linear_cross_entropy
	$(BIN)/python -m benchmarks.operation grouped_matmul

lock: $(STAMP)  ## Resolve the pinned versions anew.
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --group dev --extra remote --no-annotate --no-header pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --group targets --no-annotate --no-header pyproject.toml -o requirements-targets.lock

clean:  ## Remove the environments and everything that was built.
	rm -rf $(VENV) .venv-* build dist site

# What ejkernel needs to run, at the pinned versions; the build backend comes first, so that nothing else is fetched.
$(RUNS): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements.lock uv
	$(INSTALL) --constraint requirements.lock hatchling editables
	$(INSTALL) --constraint requirements.lock --no-build-isolation --editable .
	touch $@

# And what developing it needs.
$(STAMP): $(RUNS)
	$(INSTALL) --requirement requirements.lock
	touch $@

$(TARGETS_STAMP): pyproject.toml requirements-targets.lock
	$(TARGETS_PYTHON) -m venv $(TARGETS_VENV)
	$(TARGETS_VENV)/bin/pip install --quiet --requirement requirements-targets.lock
	$(TARGETS_VENV)/bin/pip install --quiet --constraint requirements-targets.lock --no-build-isolation --editable .
	touch $@
