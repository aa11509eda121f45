# make demo   train a real model with plain DDP and with ddp_hooks, side by side
# make test   build and test every capability, with each value of a parameter; make test-all every combination, as CI does
# make test-asan, make test-tsan  build with sanitizers, elsewhere, and run every test on that build
# make fuzz   an hour of random programs, with plain DDP and with the hook; FUZZ_OPTIONS='--seeds 0:5000' or others
# make matrix  build and test with every supported torch, each in an environment of its own; gigabytes, an hour
# make check  the linters
# make reference  docs/reference.md from the docstrings
# make wheels  in dist/: the wheel for PYTHON and every supported torch, the sources, checksums; gigabytes are fetched.
#              make wheel leaves out every torch but the installed one
# make clean  remove what was built
#
# TORCH=torch==2.12.0 and PYTHON=python3.12 choose other versions; MAX_JOBS limits how many compilers run at once.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The trainers that some tests need, and nothing else.
TRAINERS := $(VENV)/.trainers
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.cpp')

export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes. Where this is set, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-asan test-tsan fuzz matrix check format build wheel wheels install-wheel reference clean

demo: build
	$(BIN)/python examples/demo.py $(DEMO_OPTIONS)

# From another folder, so that what is tested is what is installed: this checkout, or with INSTALL=install-wheel a wheel.
# What only tests use is built in the checkout in any case.
INSTALL ?= build
# Three files at once, each in a process with ranks of its own: many tests wait, and two leave a sixth of two cores idle.
# TEST_OPTIONS='-n 0' runs all in one process.
test: build $(INSTALL) $(TRAINERS)
	cd tests && $(abspath $(BIN))/python -m pytest -n 3 --dist loadfile $(TEST_OPTIONS)

test-all:
	$(MAKE) test TEST_OPTIONS='--all $(TEST_OPTIONS)'

# In folders of their own, so that nothing of it gets into the ordinary build. Not with warnings as errors: of what is
# instrumented, gcc warns without a cause now and then.
test-asan: SANITIZERS := address,undefined
test-tsan: SANITIZERS := thread
test-asan test-tsan: test-%: $(STAMP)
	DDP_HOOKS_SANITIZE=$(SANITIZERS) DDP_HOOKS_TESTING=1 DDP_HOOKS_CUDA=0 DDP_HOOKS_WERROR=0 \
	  $(BIN)/python setup.py --quiet build --build-base build/$* --build-lib build/$*/lib
	$(BIN)/python tests/campaigns/sanitized.py $* $(TEST_OPTIONS)

FUZZ_OPTIONS ?= --minutes 60
fuzz: build
	$(BIN)/python tests/campaigns/fuzz.py $(FUZZ_OPTIONS)

# MATRIX='2.15.0 2.14.1@3.10' chooses, MATRIX='--write docs/tested-versions.md' renews that page.
matrix: $(STAMP)
	$(BIN)/python tests/campaigns/matrix.py $(MATRIX)

reference: build $(TRAINERS)
	$(BIN)/python tests/campaigns/reference.py

# --inplace builds are incremental; pip is asked only once, to make the package importable from everywhere.
build: $(STAMP)
	DDP_HOOKS_TESTING=1 $(BIN)/python setup.py --quiet build_ext --inplace

$(STAMP): pyproject.toml ddp_hooks/_version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'setuptools>=77' wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[dev]'
	touch $@

$(TRAINERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'ddp_hooks[integrations]'
	touch $@

# From the source distribution, so that what is in that is enough. WHEELS='2.13.0 2.15.0' chooses.
wheels: $(STAMP)
	$(BIN)/python building/wheels.py $(WHEELS)

wheel:
	$(MAKE) wheels WHEELS=--installed

install-wheel: wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall dist/*.whl

check: $(STAMP) $(TRAINERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist *.egg-info ddp_hooks/*.so ddp_hooks_testing/*.so $(VENV)
