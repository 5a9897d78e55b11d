# Each target sets up what it needs: a virtual environment in .venv, installed once.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test test-slow check bench wheel clean

train: $(VENV)/.installed          ## train the default recipe on real data
	$(BIN)/python -m src.train $(ARGS)

test: $(VENV)/.tested check        ## lint, types and the test suite
	$(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

test-slow: $(VENV)/.tested         ## the long campaigns
	$(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.tested
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples
	$(BIN)/mypy

bench: $(VENV)/.tested             ## our step against other loops, interleaved; results to bench/results
	$(PIP) -e '.[bench]'
	$(BIN)/python -m bench.overhead $(ARGS)

wheel: $(VENV)/.tested
	$(BIN)/python -m build --wheel

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.tested: $(VENV)/.installed
	$(PIP) -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist
