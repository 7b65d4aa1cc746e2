# One line per target; `make help` lists them. PYTHON=python3.12 chooses another interpreter,
# WORKERS=2 runs fewer tests beside each other, TORCH=2.11.0 takes that release of torch, in an
# environment of its own.

PYTHON ?= python3
WORKERS ?= 3
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all check format screenshot bench house snapshot words zoo gpu-bundle clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(INSTALLED)  ## make .venv with boltmesh, editable, and all development tools

# torch first and by itself: it then satisfies every later requirement, so that nothing replaces
# its build by another one. The stamp is written last, so a broken install is repeated. Releases of
# torch differ in the setuptools that they take, so another one chooses its own.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/;/^setuptools==/d)' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install --quiet -c $(VENV)/constraints.txt torch
	$(PIP) install --quiet -c $(VENV)/constraints.txt -e ".[dev]"
	touch $@

demo: venv  ## train a small GPT on two CPU ranks for about two minutes
	@echo 'Watch it from another terminal: $(BIN)/boltmesh top'
	$(BIN)/boltmesh fit ddp run.name=demo
	@printf '%s\n' '' 'Next, after ". $(BIN)/activate":' \
	  '  boltmesh fit ddp run.name=demo resume=auto max_steps=1200   # go on where it stopped' \
	  '  boltmesh fit ddp data.init_args.path=FOLDER                 # other text' \
	  '  boltmesh fit ddp --print-config > mine.yaml                 # a config of your own'

# Each worker of pytest imports all tests, and compiles them where that is not kept.
unexport PYTHONDONTWRITEBYTECODE

# Many tests wait, for a process to start or to end; meanwhile another worker computes.
TESTS := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=20

test: check  ## check, then a test of each capability; about ten minutes on two cores
	$(TESTS) -m "not full"

test-all: check  ## check, then every test there is; about two hours
	$(TESTS)

# Types are those of the release of torch that constraints.txt names.
check: venv  ## lint, format, types, import contracts, words
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(if $(TORCH),,$(BIN)/mypy)
	$(BIN)/lint-imports
	$(BIN)/python -m tests.guards.words

format: venv  ## rewrite the sources as ruff likes them
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format

screenshot: venv  ## draw docs/dashboard.svg from the dashboard's demo source
	$(BIN)/python docs/screenshot.py

bench: venv  ## run all benchmarks: steps beside others', memory, disk, telemetry, the viewer
	for each in tests/benchmarks/*.py; do OMP_NUM_THREADS=1 $(BIN)/python $$each || exit 1; done

house: venv  ## print the size and the structure of the packages beside their goals
	$(BIN)/python -m tests.guards.house

snapshot: venv  ## rewrite tests/guards/*.txt after an intended change of interface or words
	$(BIN)/python -m tests.guards.interface
	$(BIN)/python -m tests.guards.errors

words: venv  ## print the phrases that the word lint finds, lower its budget
	$(BIN)/python -m tests.guards.words --update

# Packages without their requirements: the file holds all, and none replaces torch or Lightning.
.venv-zoo/.installed: tests/zoo/requirements.txt constraints.txt
	$(PYTHON) -m venv .venv-zoo
	.venv-zoo/bin/pip install --quiet -c constraints.txt torch
	.venv-zoo/bin/pip install --quiet --no-deps -r tests/zoo/requirements.txt
	.venv-zoo/bin/pip install --quiet --no-deps -e .
	touch $@

zoo: .venv-zoo/.installed  ## train modules of other packages under every strategy; an hour
	.venv-zoo/bin/python -m tests.zoo --write

# What pytest and boltmesh need beside torch, Lightning, psutil and nvidia-ml-py.
GPU_PACKAGES := omegaconf pyyaml textual msgspec platformdirs mdit-py-plugins markdown-it-py \
  mdurl rich pygments linkify-it-py uc-micro-py pytest-asyncio pytest-timeout pytest-xdist execnet torchao
GPU_PYTHON ?= 3.12

gpu-bundle: venv  ## make .gpu, what a machine with a GPU and no package index needs; at most 64 MiB
	rm -rf .gpu && mkdir -p .gpu/wheels
	$(PIP) wheel --quiet --no-deps -w .gpu/wheels .
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
	  --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform any \
	  -c constraints.txt -d .gpu/wheels $(GPU_PACKAGES)
	cp -r tests examples configs pyproject.toml .gpu
	find .gpu -name __pycache__ -prune -exec rm -rf {} +
	@printf '%s\n' 'In .gpu there:' \
	  '  pip install --no-index --no-deps --target site wheels/*.whl' \
	  '  PYTHONPATH=site:. python -m tests.gpu.campaign --out results'
	@test $$(du -sm .gpu | cut -f1) -le 64 || { echo 'over 64 MiB'; exit 1; }

clean:  ## remove what builds and tests leave; runs and checkpoints stay
	rm -rf build dist *.egg-info .coverage* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
