# The commands of the README. They make a virtual environment in .venv the first time and use it from then on; any Python from 3.11 to 3.13 will do:
#   make test PYTHON=python3.12        make test PYTEST_ARGS="tests/io -x"

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
BENCHMARKS := $(filter-out benchmarks/common.py benchmarks/gpu_load.py benchmarks/gpu_tables.py benchmarks/table.py,$(wildcard benchmarks/[a-z]*.py))

.PHONY: demo test check bench clean
.DEFAULT_GOAL := demo

# Simulates a small set of particles, aligns it and writes demo_run/run/report.html.
demo: $(VENV)/.installed
	rm -rf demo_run
	$(BIN)/numba-glocal demo -o demo_run

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.installed-check
	$(BIN)/ruff check .
	$(BIN)/mypy numba_glocal cli

bench: $(VENV)/.installed-test
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done
	$(BIN)/python benchmarks/table.py

clean:
	rm -rf $(VENV) demo_run build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache

# Stamps: nothing is installed again until setup.cfg or pyproject.toml change.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "Python 3.11 to 3.13 is needed, $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.cfg pyproject.toml | $(BIN)/python
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-test: setup.cfg pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-check: setup.cfg pyproject.toml | $(BIN)/python
	$(PIP) --editable '.[check]'
	@touch $@ $(VENV)/.installed
