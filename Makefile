# `make demo` trains on real text and shows the result on a page; `make test` runs the whole suite. Both set themselves up.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# What other machines may round, order or schedule otherwise: everything between `attend` and a whole model.
NUMERIC := $(addprefix tests/,attention block contracts core depth dot_product feedforward heads objectives ops patterns position sequence stack test_model.py)
TESTS := $(BIN)/python -m pytest -n 2

.PHONY: demo test fuzz test-avx2 test-shuffled test-busy kills check docs site linkcheck tutorials explorer dist clean

demo: .venv/installed
	$(BIN)/polyformer train

test: .venv/developed
	$(TESTS)

# The numeric core as a processor without AVX-512 computes it.
test-avx2: .venv/developed
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(TESTS) $(NUMERIC)

# The numeric core in random order; `--randomly-seed N`, with the seed that it prints, repeats one.
test-shuffled: .venv/developed
	$(TESTS) --override-ini addopts= $(NUMERIC)

# The numeric core while every core of the machine is kept busy.
test-busy: .venv/developed
	$(BIN)/python tests/under_load.py $(TESTS) $(NUMERIC)

# Thousands of broken and hostile inputs, others each time, in 16 GiB of address space.
fuzz: .venv/developed
	ulimit -v 16777216; OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz --hypothesis-profile fuzz

# 300 kills of a training process at named operations on its files.
kills: .venv/developed
	KILLS=300 $(BIN)/python -m pytest -s tests/training/test_kill_campaign.py

check: .venv/developed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/python -m polyformer.documentation --check

docs: .venv/developed
	$(BIN)/python -m polyformer.documentation

# The documentation as a site, build/site/html/index.html: warnings and broken links are errors, nothing is fetched.
site: .venv/developed
	$(BIN)/python docs/site/build.py

# The addresses of other sites, which needs a network.
linkcheck: .venv/developed
	$(BIN)/python docs/site/build.py --external

# Runs the tutorials that changed and records what they print.
tutorials: .venv/developed
	$(BIN)/python docs/site/tutorials.py

# The explorer's script and style out of explorer/src (needs node): built twice, they are the same, byte for byte.
BUNDLE := src/polyformer/visual/explorer
explorer:
	cd explorer && npm ci --no-audit --no-fund && npm run types && npm run build
	cd $(BUNDLE) && sha256sum explorer.js explorer.css explorer.lock.json > $(CURDIR)/explorer/node_modules/first.sha256
	cd explorer && npm run build
	cd $(BUNDLE) && sha256sum --check --quiet $(CURDIR)/explorer/node_modules/first.sha256

# Wheel and source distribution, in dist/.
dist: .venv/developed
	$(BIN)/python -m build

clean:
	rm -rf .venv build dist src/*.egg-info

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable .
	touch $@

.venv/developed: .venv/installed
	$(INSTALL) --editable '.[dev]'
	command -v chromium > /dev/null || $(BIN)/playwright install chromium # the explorer's page is tested in it
	touch $@
