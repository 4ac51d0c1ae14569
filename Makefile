# Two commands from nothing: `make quickstart` trains on real text, `make test` proves the laws. Both set up .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Processes that run tests at once, each with up to 8 ranks of its own.  A third one works while the tests of two wait for a clock.
JOBS ?= 3

.PHONY: help quickstart test test-fast chaos lint types bench docs clean
.DEFAULT_GOAL := help

help: ## what the targets do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(VENV)/.run ## set up, then train a small Llama on eight ranks (a few minutes, no download of data)
	$(BIN)/megazero train examples/quickstart.toml

test: $(VENV)/.test ## set up, then run the whole suite (under ten minutes on two cores)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-fast: $(VENV)/.test ## the laws in small: one shape of each kind (under two minutes on two cores)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --small

chaos: $(VENV)/.test ## 50 rounds of runs that are killed, started twice, given full disks and flipped bits, and resumed on other shapes
	$(BIN)/python tests/chaos.py

lint: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

bench: $(VENV)/.bench ## time a step beside DDP, FSDP2, DeepSpeed, DTensor and torch pipelines
	$(BIN)/python -m benchmarks.all --out speed_$(shell nproc)cpu

docs: $(VENV)/.docs ## build the site of docs/ into site/, with search and the API
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e .
	touch $@

# DeepSpeed, beside which tests and benchmarks run, is built by a setup.py that imports torch: in this environment, after torch.
$(VENV)/.deepspeed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e . 'setuptools>=77'
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation -e '.[deepspeed]'
	touch $@ $(VENV)/.run

$(VENV)/.test: $(VENV)/.deepspeed
	$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[dev]'
	touch $@ $(VENV)/.run

$(VENV)/.bench: $(VENV)/.deepspeed
	$(INSTALL) -e '.[bench]'
	touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) -e '.[docs]'
	touch $@ $(VENV)/.run

clean: ## remove the environment, runs and caches
	rm -rf $(VENV) runs site .pytest_cache .mypy_cache .ruff_cache *.egg-info
