# Each target sets up what it needs. `make help` lists them.

PYTHON ?= python3
# Extras to install: `make setup EXTRAS=dev,torch`.
EXTRAS ?= dev,federated,ray,serve,torch
# Further words for pytest: `make test PYTEST_ARGS="-m slow"`.
PYTEST_ARGS ?=
# Processes that share the tests, and the type checks.
JOBS ?= auto
# Scripts that `make bench` runs.
BENCH ?= $(sort $(wildcard benchmarks/*.py))
# Benchmarks that `make results` runs, and the folder with public traces for them.
KIND ?= simulated,cpu
DATA ?=
# Property tests draw the same examples every time; `HYPOTHESIS_PROFILE=explore` draws new ones.
HYPOTHESIS_PROFILE ?= ci
export HYPOTHESIS_PROFILE
# Tests start hundreds of Python processes, each of which would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
comma := ,
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))

# uv looks into local wheel folders only when told in its own variable.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: setup demo test check bench bench-policies results docs clean help

setup: $(STAMP) ## make the virtual environment and install carpool into it
	@echo "Ready: $(BIN)/carpool"

$(BIN)/python:
	@echo "Making $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than 3.11. Name a newer one: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# uv is quick but does not read pip's configuration, so pip takes over wherever uv cannot do it.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing carpool[$(EXTRAS)]"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv \
	  && $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[$(EXTRAS)]' \
	  || { echo "uv could not do it; trying pip"; \
	       $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'; }
	@touch $@

demo: $(STAMP) ## train the built-in jobs shared, one after another and by hand, and print the gain
	@$(BIN)/carpool demo

test: $(STAMP) ## run the tests
	@$(BIN)/python -m pytest -q -n $(JOBS) $(PYTEST_ARGS)

check: $(STAMP) ## format, lint, types, import floors, tests: all that has to pass
	@echo "== format" && $(BIN)/ruff format --check --quiet . \
	  || { echo "Not formatted as agreed. Run: $(BIN)/ruff format ." >&2; exit 1; }
	@echo "== lint" && $(BIN)/ruff check --quiet .
	@echo "== types" && $(BIN)/mypy --no-error-summary --num-workers $(JOBS)
	@echo "== floors" && { report=$$($(BIN)/lint-imports 2>&1) || { echo "$$report"; exit 1; }; }
	@echo "== tests" && $(MAKE) --no-print-directory test

bench: $(STAMP) ## run the benchmarks, one script per claim
	@test -n "$(BENCH)" || echo "No benchmarks yet."
	@set -e; for script in $(BENCH); do echo "== $$script"; $(BIN)/python "$$script"; done

bench-policies: $(STAMP) ## the default policy on every ground against everybody else
	@$(BIN)/python benchmarks/policies.py

results: $(STAMP) ## run the benchmarks of KIND (simulated,cpu or h200) and write their figures into the pages
	@$(BIN)/python tools/results.py run --kind $(KIND) $(if $(DATA),--data $(DATA))

docs: $(STAMP) ## check all links and build the documentation as a site in build/site
	@$(BIN)/python tools/check_docs.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo "Open build/site/index.html"

clean: ## remove caches and what was built, but not the environment
	@rm -rf build dist out .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	@echo "Clean. To start afresh remove $(VENV) too."

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
