# `make demo` and `make test` need Python 3.11–3.13 and nothing else.
PYTHON ?= $(firstword $(foreach v,3.12 3.11 3.13,$(if $(shell python$(v) -c "" 2>/dev/null && echo yes),python$(v))) python3)
BIN = .venv/bin
INSTALLED = .venv/.installed

.PHONY: demo test test-quick quick-half quick-rest test-ray test-processes processes-half processes-rest test-slow bench lint docs lock clean

demo: $(INSTALLED)
	$(BIN)/distill sweep digits

# Several processes of pytest at a time; each one's output comes in one piece.
PARALLEL = --no-print-directory --keep-going $(if $(filter output-sync,$(.FEATURES)),--output-sync)
PYTEST = $(BIN)/python -m pytest
# Tests start hundreds of Pythons: without bytecode each compiles the project anew, for a second or more.
export PYTHONDONTWRITEBYTECODE =
QUICK = nice -n 10 $(PYTEST) -m "not integration and not processes and not slow and not gpu"
PROCESSES = nice -n 5 $(PYTEST) -m "processes and not integration and not slow and not gpu"
HALF = $(addprefix tests/trainables/,models data device metrics engine teachers distributed)

# Four for two cores: the tests with Ray and with processes mostly wait. Ray's, the longest, come first for the processors, and the
# quick ones take what is left.
test: $(INSTALLED)
	$(MAKE) $(PARALLEL) --jobs=4 test-ray processes-half processes-rest quick-half quick-rest lint

# No Ray, no server, no ranks or killed children, none of the longest simulated searches.
test-quick: $(INSTALLED)
	$(MAKE) $(PARALLEL) --jobs=2 quick-half quick-rest

quick-half: $(INSTALLED)
	$(QUICK) $(HALF)

quick-rest: $(INSTALLED)
	$(QUICK) $(HALF:%=--ignore=%)

test-ray: $(INSTALLED)
	$(PYTEST) -m "integration and not slow and not gpu" tests/integration

test-processes: processes-half processes-rest

processes-half: $(INSTALLED)
	$(PROCESSES) tests/trainables

processes-rest: $(INSTALLED)
	$(PROCESSES) --ignore=tests/trainables

test-slow: $(INSTALLED)
	$(PYTEST) -m slow

bench: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in site/; a link or an anchor that leads nowhere is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

.venv/.docs: docs/requirements.lock $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --require-hashes -r docs/requirements.lock
	touch $@

# The lock's wheels are verified by hash; the project itself is installed in place, without asking an index.
$(INSTALLED): requirements.lock tests/requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "raydistill needs Python 3.11 to 3.13; set PYTHON=python3.12, say" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --require-hashes -r tests/requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	touch $@

# Universal over Python 3.11–3.13; needs uv on the PATH or in the environment. What runs, what tests it, what makes the site.
COMPILE = uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --quiet
lock:
	$(COMPILE) pyproject.toml --extra timm --extra export --output-file requirements.lock
	$(COMPILE) --group dev --constraint requirements.lock --output-file tests/requirements.lock
	$(COMPILE) --group docs --constraint requirements.lock --output-file docs/requirements.lock

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
