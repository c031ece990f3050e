# `make demo` trains on real text and shows the result on a page; `make test` runs the whole suite. Both set themselves up.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# What other machines may round, order or schedule otherwise: everything between `attend` and a whole model.
NUMERIC := $(addprefix tests/,attention contracts core nn models/architectures/test_model.py training/objectives)
TESTS := $(BIN)/python -m pytest -n 2
# `make test-avx2 EACH=EVERYTHING=1` and the other repetitions of the numeric core then take all examples.
EACH :=

.PHONY: demo test test-night test-everything speed fuzz test-avx2 test-shuffled test-busy gpu kills mixins mutants check docs site linkcheck tutorials explorer dist clean

demo: .venv/installed
	$(BIN)/polyformer train

test: .venv/developed
	$(TESTS)

# A part of all that `make test` leaves out (tests/nights.py): PART=1/6 to PART=6/6 run all of it.
# Parts 1 to 3 of 6 also run a long form of their tests.
PART := 1/6
test-night: .venv/developed
	DAY=build/day.json $(BIN)/python -m pytest --collect-only --quiet --quiet | tail -n 1
	EVERYTHING=1 NIGHT=$(PART) DAY=build/day.json $(TESTS)
	$(if $(filter 1/6,$(PART)),$(MAKE) kills KILLS=60)
	$(if $(filter 2/6,$(PART)),$(MAKE) fuzz FUZZ=night)
	$(if $(filter 3/6,$(PART)),$(MAKE) mixins)

# The suite with every example, half precision and product, then the long forms of its tests: hours.
test-everything: .venv/developed
	EVERYTHING=1 $(TESTS)
	$(MAKE) kills fuzz mixins

# This checkout against an earlier one, in turn: BASE=REV (by default a day old), ONLY="ROW ROW", ISA=avx2.
speed: .venv/developed
	$(BIN)/python tests/speed.py $(if $(BASE),--base $(BASE)) $(if $(ONLY),--only $(ONLY)) \
		$(if $(ISA),--isa $(ISA)) $(if $(RECORD),--record docs/results/speed_history.csv)

# The numeric core as a processor without AVX-512 computes it.
test-avx2: .venv/developed
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(EACH) $(TESTS) $(NUMERIC)

# The numeric core in random order; `--randomly-seed N`, with the seed that it prints, repeats one.
test-shuffled: .venv/developed
	$(EACH) $(TESTS) --override-ini addopts= $(NUMERIC)

# The numeric core while every core of the machine is kept busy.
test-busy: .venv/developed
	$(EACH) $(BIN)/python tests/under_load.py $(TESTS) $(NUMERIC)

# Thousands of broken and hostile inputs, others each time, in 16 GiB of address space; FUZZ=night: fewer.
FUZZ := fuzz
fuzz: .venv/developed
	ulimit -v 16777216 && OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz --hypothesis-profile $(FUZZ)

# Kills of a training process at named operations on its files.
KILLS := 300
kills: .venv/developed
	KILLS=$(KILLS) $(BIN)/python -m pytest -s tests/training/test_kill_campaign.py

# What only a GPU can show, in at most 40 minutes: build/gpu/gpu.json and a page. It takes up where it stopped.
gpu: .venv/developed
	$(BIN)/python tests/gpu.py

# How many of 100 seeded faults in the numeric core its tests notice: build/mutants.json.
mutants: .venv/developed
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py

# transformers' own tests of models, on wrapped models: they are in its source distribution.
mixins: .venv/developed
	$(INSTALL) parameterized
	rm -rf build/mixins && mkdir -p build/mixins
	$(BIN)/python -m pip download --quiet --no-deps --no-binary :all: --dest build/mixins --constraint constraints.txt transformers
	tar --extract --gzip --file build/mixins/transformers-*.tar.gz --directory build/mixins --strip-components 1
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --override-ini filterwarnings= tests/models/transformers/mixins.py

check: .venv/developed
	$(BIN)/ruff format --check
	$(BIN)/ruff check --no-cache # a cached verdict survives a new module that changes what is sorted where
	$(BIN)/pyright
	$(BIN)/python tests/prose.py src lab docs examples README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md
	$(BIN)/python -m polyformer.cli.documentation --check
	$(BIN)/python -m polyformer_lab.documentation --check

docs: .venv/developed
	$(BIN)/python -m polyformer.cli.documentation
	$(BIN)/python docs/site/learning.py
	$(BIN)/python -m polyformer_lab.documentation

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
BUNDLE := src/polyformer/cli/plots/explorer
explorer:
	cd explorer && npm ci --no-audit --no-fund && npm run types && npm run build
	cd $(BUNDLE) && sha256sum explorer.js figures.js explorer.css explorer.lock.json > $(CURDIR)/explorer/node_modules/first.sha256
	cd explorer && npm run build
	cd $(BUNDLE) && sha256sum --check --quiet $(CURDIR)/explorer/node_modules/first.sha256

# Wheels and source distributions of the library and of its laboratory, in dist/.
dist: .venv/developed
	$(BIN)/python -m build
	$(BIN)/python -m build --outdir dist lab

clean:
	rm -rf .venv build dist src/*.egg-info

.venv/installed: pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) --editable . --editable lab
	touch $@

.venv/developed: .venv/installed
	$(INSTALL) --editable '.[dev]' --editable lab
	# Kernels for GPUs run in Triton's interpreter, from a folder that torch does not see.
	[ "$$(uname)" != Linux ] || $(INSTALL) --no-deps --upgrade --target .venv/share/interpreter fla-core triton
	$(BIN)/python tests/browsers.py # the explorer's page is tested in a real browser
	touch $@
