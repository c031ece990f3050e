# `make demo` trains on real text and shows the result; `make test` runs the whole suite. Both set themselves up.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test check docs clean

demo: .venv/installed
	$(BIN)/polyformer train

test: .venv/developed
	$(BIN)/python -m pytest -n 2

check: .venv/developed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/python -m polyformer.documentation --check

docs: .venv/developed
	$(BIN)/python -m polyformer.documentation

clean:
	rm -rf .venv build src/*.egg-info

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable .
	touch $@

.venv/developed: .venv/installed
	$(INSTALL) --editable '.[dev]'
	touch $@
