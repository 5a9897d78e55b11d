# Each target sets up what it needs: a virtual environment in .venv, installed once.
PYTHON ?= python3
VENV   ?= .venv
OLDEST ?= .venv-oldest
NEWEST ?= .venv-newest
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := --no-build-isolation --require-hashes -r requirements
# uv installs in a third of pip's time. Where it finds no packages, as behind an index that only pip is told of, pip does.
UV     := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python
MUTANTS := build/mutants
TESTS  ?= $(sort $(foreach module,$(MODULES),tests/$(firstword $(subst /, ,$(module)))))
LOCK   := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate -c constraints.txt

.PHONY: train test test-slow test-oldest test-newest fuzz mutants check docs bench wheel audit lock clean

train: $(VENV)/.installed          ## train the default recipe on real data
	$(BIN)/python -m src.train $(ARGS)

test: $(VENV)/.tested check        ## lint, types and the test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" -rs $(ARGS)

test-slow: $(VENV)/.tested         ## the long campaigns
	$(BIN)/python -m pytest -m slow -rs $(ARGS)

fuzz: $(VENV)/.tested              ## 10,000 pieces of odd input of each kind, drawn anew: hours
	HYPOTHESIS_PROFILE=campaign $(BIN)/python -m pytest -n 2 --dist worksteal -m fuzz --timeout 0 $(ARGS)

mutants: $(VENV)/.tested           ## MODULES="scheduler core/rng": change their code, one place at a time; which changes do their tests not see?
	$(PIP) $(LOCKED)/mutants.txt
	rm -rf $(MUTANTS) && mkdir -p $(MUTANTS) && git ls-files | xargs cp -P --parents -t $(MUTANTS)
	echo 'only_mutate = [$(MODULES:%="src/drivetrain/%*",)]' >> $(MUTANTS)/pyproject.toml
	echo 'pytest_add_cli_args_test_selection = [$(TESTS:%="%",)]' >> $(MUTANTS)/pyproject.toml
	cd $(MUTANTS) && $(abspath $(BIN))/mutmut run --max-children 2 && $(abspath $(BIN))/mutmut results

test-oldest: $(OLDEST)/.installed  ## what depends on torch's version, with the oldest torch that pyproject.toml promises
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" -rs tests/cuda tests/optimizer tests/compile tests/precision tests/test_contract.py $(ARGS)

test-newest: $(VENV)/.tested       ## what depends on Hydra, with the newest pre-releases of hydra-core and omegaconf
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check $(LOCKED)/tools.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check $(LOCKED)/test.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --pre --upgrade --no-deps hydra-core omegaconf
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" -rs tests/config tests/sweeps tests/cli $(ARGS)

check: $(VENV)/.tested
	$(BIN)/ruff check src tests bench examples docs/site
	$(BIN)/ruff format --check src tests bench examples docs/site
	$(BIN)/mypy

docs: $(VENV)/.tested              ## the documentation as a site, to read and search without a network: outputs/site/index.html
	$(PIP) $(LOCKED)/docs.txt
	$(BIN)/python -m bench.pairwise --minutes 0
	$(BIN)/python -m bench.limits
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.tested             ## our step against other loops, interleaved; results to bench/results
	$(UV) $(LOCKED)/bench.txt || $(PIP) $(LOCKED)/bench.txt
	$(BIN)/python -m bench.overhead $(ARGS)

wheel: $(VENV)/.installed          ## the wheel and its bill of materials (CycloneDX), in dist
	$(PIP) $(LOCKED)/wheel.txt
	$(BIN)/python -m build --wheel --no-isolation
	$(BIN)/cyclonedx-py requirements requirements/run.txt --pyproject pyproject.toml --validate -o dist/sbom.json
	$(BIN)/twine check dist/*.whl

audit: $(VENV)/.installed          ## do advisories name a package that is installed? It asks an advisory database over the network
	$(PIP) $(LOCKED)/wheel.txt
	$(BIN)/pip-audit --disable-pip --require-hashes -r requirements/run.txt -r requirements/test.txt

lock: $(VENV)/.installed           ## lock everything that is installed, with hashes: after a change of pyproject.toml or constraints.txt
	$(BIN)/$(LOCK) pyproject.toml --extra test -o requirements/test.txt
	$(BIN)/$(LOCK) pyproject.toml --extra timm --extra metrics -c requirements/test.txt -o requirements/run.txt
	for extra in docs bench mutants; do $(BIN)/$(LOCK) pyproject.toml --extra $$extra -c requirements/test.txt -o requirements/$$extra.txt; done
	$(BIN)/$(LOCK) requirements/tools.in -c requirements/test.txt -o requirements/tools.txt
	$(BIN)/$(LOCK) requirements/wheel.in -c requirements/test.txt -o requirements/wheel.txt
	grep -vE '^torch(vision)?==' constraints.txt | $(BIN)/$(LOCK:constraints.txt=/dev/stdin) pyproject.toml --extra test \
		--override requirements/oldest.in -o requirements/oldest.txt

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml requirements/run.txt requirements/tools.txt | $(VENV)/bin/python
	$(PIP) $(LOCKED)/tools.txt
	$(UV) $(LOCKED)/run.txt || $(PIP) $(LOCKED)/run.txt
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

$(OLDEST)/.installed: pyproject.toml requirements/oldest.txt | $(VENV)/.installed
	$(BIN)/uv venv --quiet --clear --python 3.12 $(OLDEST)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(OLDEST)/bin/python $(LOCKED)/tools.txt
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(OLDEST)/bin/python $(LOCKED)/oldest.txt
	$(BIN)/uv pip install --quiet --python $(OLDEST)/bin/python --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.tested: $(VENV)/.installed requirements/test.txt
	$(UV) $(LOCKED)/test.txt || $(PIP) $(LOCKED)/test.txt
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) build dist
