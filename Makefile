# `make tune` and `make test` are all the set-up there is.
#   make tune OP=rmsnorm GPU=h200 ARGS="--trials 100"

PYTHON ?= python3
VENV   ?= .venv
OP     ?= wkv6
GPU    ?= auto
ARGS   ?=
BIN    := $(VENV)/bin

.PHONY: tune test lint clean

tune: $(VENV)/.installed
	$(BIN)/kgen tune --op $(OP) --gpu $(GPU) $(ARGS)

# Slow tests lie together: a worker that has no more takes some of the others'.
test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kgen needs Python 3.11 or newer; this is " + sys.version + ". Try: make tune PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist
