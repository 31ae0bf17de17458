PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode is made of what is imported, and not of all that is installed.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

# One thread each: two test processes with two torch threads each are slower than with one. Bytecode is written, whatever
# the machine says: else each process that a test starts compiles all of attnswap.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# Each process starts with its own half of the files, so that the fixtures of a module are made once, and takes over
# from the other at the end.
PYTEST_ARGS := -n 2 --dist worksteal

.PHONY: quickstart test pages pages-check test-mmseg test-oldest test-newest docs dist clean

quickstart: $(VENV)/.installed
	$(BIN)/attnswap fit --config quickstart/language_modeling

# Style, types, imports, and the tests in brief, as CI (tests/costs.py says which). `make test EVERY=1`: all, before
# a release. `make test FAST=1`: style, and the tests that are cheap, while working.
test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m docs.pages check
ifndef FAST
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
endif
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS) $(if $(EVERY),,$(if $(FAST),--fast,--brief))

# The tables, numbers, summaries and figures of docs/results, of the raw files beside them; and what differs from these.
pages: $(VENV)/.installed-test
	$(BIN)/python -m docs.pages build

pages-check: $(VENV)/.installed-test
	$(BIN)/python -m docs.pages check

# After `test`, in the same environment: what the extra [mmseg] adds, which `test` skips on a fresh clone.
test-mmseg: $(VENV)/.installed-mmseg
	$(BIN)/python -c "import mmseg"
	$(TEST_ENV) $(BIN)/python -m pytest $(PYTEST_ARGS) -k mmseg

# Swapping, mechanisms, hosts and callbacks with the oldest torch and torchvision that setup.cfg names, and what pip
# finds beside them, in an environment of its own.
OLDEST := sed -n 's/^ *\(torch\|torchvision\)>=\(.*\)/\1==\2.*/p' setup.cfg
test-oldest:
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --editable '.[test]' $$($(OLDEST))
	$(TEST_ENV) .venv-oldest/bin/python -m pytest $(PYTEST_ARGS) tests/attention_modules tests/lightning_tasks/callbacks

# The same with the newest that pip finds, whatever constraints.txt says; `FAST=1` leaves out callbacks and the costly tests.
test-newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable '.[test]'
	$(TEST_ENV) .venv-newest/bin/python -m pytest $(PYTEST_ARGS) tests/attention_modules \
		$(if $(FAST),--fast,tests/lightning_tasks/callbacks)

# The site in build/docs. `make docs DOCS_ARGS="-D nb_execution_mode=off"` leaves the tutorials as they are written.
docs: $(VENV)/.installed-docs
	$(TEST_ENV) $(BIN)/python -m sphinx --fail-on-warning --keep-going --jobs auto $(DOCS_ARGS) docs build/docs

# The wheel and the source distribution, in dist/.
dist: $(VENV)/.installed-test
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest build dist *.egg-info

$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/.installed-test: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[test]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-mmseg: $(VENV)/.installed-test
	$(PIP) --editable '.[mmseg]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) --editable '.[docs]'
	touch $@
