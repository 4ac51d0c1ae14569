# Two commands from nothing: `make quickstart` trains on real text, `make test` proves the laws. Both set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: quickstart test chaos lint types bench clean

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

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.all

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

# DeepSpeed is built by a setup.py that imports torch: after everything else, and in this environment.
$(VENV)/.bench: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e . 'setuptools>=77'
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation -e '.[bench]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
