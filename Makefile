# `make demo` and `make test` do all their own set-up, on a machine with python3 and pip.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export MPLBACKEND := Agg
# A file's tests share what is made once; in the order of tests/conftest.py, which begins with the longest.
SIDE_BY_SIDE := -n auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo demo-flower test test-fast test-faults test-install lint docs benchmark clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv, about a minute ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@command -v chromedriver >/dev/null || (apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver) \
		>/dev/null 2>&1 || echo "NO CHROMIUM: it could not be installed, so the page of expunge serve WILL NOT BE TESTED."
	@touch $(READY)

demo: $(READY)  ## train a small federation, forget a poisoned client, compare with retraining
	$(BIN)/expunge demo --out runs/demo

demo-flower: $(READY)  ## the same on a real Flower deployment on this machine: TLS, keys, a site that has gone
	$(BIN)/python examples/flower-deployment/deploy.py --out runs/demo-flower

test: lint  ## lint, types and every test
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -q

test-fast: $(READY)  ## the tests that take no more than a few seconds each
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -q -m 'not slow'

test-faults: $(READY)  ## kill -9: inside request run and forget --erase, sites and servers of a Flower deployment; an hour
	$(BIN)/python -m pytest -q -s tests/faults

test-install:  ## install without extras into an empty environment, and run what the README shows
	@set -e; bare=$$(mktemp -d); trap 'rm -rf "$$bare"' EXIT; \
	$(PYTHON) -m venv "$$bare"; \
	"$$bare/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt .; \
	"$$bare/bin/python" -P tests/install/readme_snippets.py; \
	"$$bare/bin/expunge" --version; "$$bare/bin/expunge" methods

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## put measured numbers into the documents
	$(BIN)/python docs/build.py

benchmark: $(READY)  ## the cost of curvature products, beside curvlinops
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,peers]'
	$(BIN)/python benchmarks/curvature.py

clean:  ## remove the virtual environment and caches, not runs/
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
