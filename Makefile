# Two commands from nothing: `make quickstart` trains on real text, `make test` proves the laws. Both set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: quickstart test chaos lint types clean

quickstart: $(VENV)/.run
	$(BIN)/megazero train examples/quickstart.toml

test: $(VENV)/.test
	$(BIN)/python -m pytest

chaos: $(VENV)/.test
	$(BIN)/python tests/chaos.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[test]'
	touch $@ $(VENV)/.run

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[dev]'
	touch $@ $(VENV)/.test $(VENV)/.run

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
