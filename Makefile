# The commands of the README. Each installs what it needs first; `make install` alone does only that.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
PACKAGES := bench cli engines export runtime train
TYPED := build/typed
CHECK ?= redraft

MODEL ?= tiny
NAME := $(notdir $(patsubst %/,%,$(MODEL)))
ENGINES := build/engines/$(NAME)

.PHONY: install demo engines test test-fast test-gpu lint format typecheck check-types check-imports typed-tree clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "redraft needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: install
	@$(BIN)/redraft build tiny -o build/engines/tiny
	@$(BIN)/redraft demo --engines build/engines/tiny

# MODEL is a recipe's name, a checkpoint folder or a Hugging Face id; MODEL_PATH the folder of a recipe's checkpoint; LYANNA
# a drafter's folder, none or random; WEIGHTS=random needs no checkpoint; the rest passes through to `redraft build`.
engines: install
	$(BIN)/redraft build $(MODEL) -o $(ENGINES) $(if $(MODEL_PATH),--model-path $(MODEL_PATH)) \
	  $(if $(PRECISION),--precision $(PRECISION)) $(if $(BACKEND),--backend $(BACKEND)) \
	  $(if $(WEIGHTS),--weights $(WEIGHTS)) $(if $(CONTEXT),--context $(CONTEXT)) $(if $(LYANNA),--lyanna $(LYANNA))

test: install
	$(BIN)/python -m pytest -m 'not gpu' $(ARGS)

test-fast: install
	$(BIN)/python -m pytest -m 'not gpu and not slow' $(ARGS)

# -rs prints why each test was skipped; status 5 means that no test carries the mark.
test-gpu: install
	$(BIN)/python -m pytest -m gpu -rs $(ARGS) || { status=$$?; test $$status -eq 5 && echo "no test needs a GPU"; }

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy and import-linter read packages by folder, and `redraft.runtime` lives in `runtime/`: give them the tree as
# it is imported. A missing link would silently shrink what is checked, so tests/test_contracts.py plants errors.
typed-tree:
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/redraft
	@ln -s $(CURDIR)/redraft/* $(TYPED)/redraft/
	@ln -s $(addprefix $(CURDIR)/,$(PACKAGES)) $(TYPED)/redraft/

typecheck: check-types check-imports

check-types: install typed-tree
	cd $(TYPED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p $(CHECK)

check-imports: install typed-tree
	cd $(TYPED) && PYTHONPATH=. $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml --no-logo

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
