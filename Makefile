# Every target makes its own environment first if it is missing: nothing but Python and a network index is needed.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
PINNED ?=
OLDEST_TORCH ?= 2.11.0
OLDEST_TRANSFORMERS ?= 5.17.0
NEWEST_PYTHON ?= python3.13
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_FOR_DEMO := $(VENV)/.ready-for-demo
# Neighbouring tests share models, so a process gets a stretch of them; compiled modules serve every process.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --dist worksteal

# Of `make heads` and `make results`: a pair (its draft left out: the built-in one), folders, and names of heads or pages.
TARGET ?= pocket
DRAFT ?=
MODELS ?= runs/models
RESULTS ?= runs/results
ONLY_HEADS ?=
ONLY_PAGES ?=
PAIR = --target $(TARGET) $(if $(DRAFT),--drafter $(DRAFT))

.PHONY: help demo heads results test test-all test-browser test-ray test-oldest test-newest docs lint format types clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' torch==$(TORCH) $(PINNED)
	@touch $@ $(READY_FOR_DEMO)

# Without what only development needs; modules are compiled when they are first imported, as few of torch's are.
$(READY_FOR_DEMO): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --no-compile -e . torch==$(TORCH) $(PINNED)
	@touch $@

demo: $(READY_FOR_DEMO) ## draw a picture, ask about it, and compare with plain decoding
	@$(BIN)/saccade demo

heads: $(READY) ## train every head that the suites compare; resumes
	$(BIN)/python -m tools.heads $(PAIR) --out $(MODELS) $(ONLY_HEADS)

results: $(READY) ## measure every suite on this revision and write docs/results; resumes
	$(BIN)/python -m tools.results $(PAIR) --models $(MODELS) --out $(RESULTS) $(ONLY_PAGES)

test: $(READY) ## the tests, slow ones left out; those marked `formats` also with bfloat16, `executors` also on OpenVINO
	$(PYTEST) -m 'not slow and not browser and not ray'
	SACCADE_CPU_BF16=1 $(PYTEST) -m 'formats and not slow' $$(grep -rl mark.formats tests --include='*.py')
	SACCADE_EXECUTOR=openvino $(PYTEST) -m 'executors and not slow' $$(grep -rl mark.executors tests --include='*.py')

test-all: $(READY) ## every test but those in a browser and on Ray
	$(PYTEST) -m 'not browser and not ray'

test-browser: $(READY) ## the server's page and the docs in a headless Chromium, which must be installed (Debian: chromium)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[browser]'
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m browser tests/serve tests/test_site.py

test-ray: $(READY) ## Ray on loopback, mostly in network namespaces; takes minutes
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[ray]'
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m ray

test-oldest: ## the tests on the oldest torch and transformers that are supported, on PYTHON=..., by default python3
	$(MAKE) test VENV=.venv-oldest TORCH=$(OLDEST_TORCH) PINNED=transformers==$(OLDEST_TRANSFORMERS)

test-newest: ## the tests on the newest Python that is supported: NEWEST_PYTHON=..., by default python3.13
	$(MAKE) test VENV=.venv-newest PYTHON=$(NEWEST_PYTHON)

docs: $(READY) ## the documentation as a site that needs no network: site/index.html
	$(BIN)/python -m tools.docs --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: $(READY) ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## put the style right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## static types
	$(BIN)/mypy

clean: ## the environments and everything that tools leave behind
	rm -rf .venv .venv-oldest .venv-newest build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
