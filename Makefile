# `make` alone lists what there is. Every target makes the virtual environment that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test files at a time: tests of emulated devices mostly sleep. More would not keep the devices' pace on 2 cores.
JOBS ?= 3
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types layers shape docs check zoo browser second-venv clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(INSTALLED) ## the virtual environment in .venv, with everything installed

demo: $(INSTALLED) ## the main job: one model on two unequal devices (emulated unless both are here)
	$(BIN)/python train.py hardware=nvidia_arc strategy=ddp

test: $(INSTALLED) ## all tests
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy, strict
	$(BIN)/mypy

layers: $(INSTALLED) ## imports go down only
	$(BIN)/lint-imports

shape: $(INSTALLED) ## the package's shape gets no worse: circles, long files, the way to a step
	$(BIN)/python scripts/shape.py --check

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## the documentation as a site, in site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'Open $(CURDIR)/site/index.html, or run: $(BIN)/mkdocs serve'

zoo: $(INSTALLED) ## models of other libraries, trained on unequal shares and compared with plain torch: docs/reference/zoo.md
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[zoo]'
	$(BIN)/python scripts/zoo.py

browser: $(INSTALLED) ## Playwright, for the tests of the dashboard's page; your system has the browser (apt-get install chromium)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'

second-venv: $(INSTALLED) ## a second interpreter with another torch, for the tests of two interpreters (1.4 GB)
	$(BIN)/python tests/integration/make_second_venv.py .venv-second
	@echo 'Now: HETEXP_SECOND_PYTHON=$(CURDIR)/.venv-second/bin/python make test'

check: test lint types layers shape docs ## what CI runs

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
