# `make tune` and `make test` are all the set-up there is.
#   make tune OP=rmsnorm GPU=h200 ARGS="--trials 100"
#   make test        lint, types and the quick tests: does this installation work?
#   make test-all    the same, then all other tests
#   make docs        the documentation site, to read offline: build/site/index.html

PYTHON ?= python3
VENV   ?= .venv
OP     ?= wkv6
GPU    ?= auto
ARGS   ?=
BIN    := $(VENV)/bin

# xdist: a process that has no more tests takes some of another's.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: tune test test-all lint docs clean

tune: $(VENV)/.installed
	$(BIN)/kgen tune --op $(OP) --gpu $(GPU) $(ARGS)

test: $(VENV)/.installed-test lint
	$(PYTEST) -m "quick and not slow" $(ARGS)

test-all: test
	$(PYTEST) -m "full and not slow" $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	PYTHONPATH=docs $(BIN)/python -m kgen_site --out build/site

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kgen needs Python 3.11 or newer; this is " + sys.version + ". Try: make tune PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
