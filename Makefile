# make demo   train a real model with plain DDP and with ddp_hooks, side by side
# make test   build and test every capability, with pairs of parameters; make test-all every test with all, as CI does
# make test-asan, make test-tsan  build with sanitizers, elsewhere, and run every test on that build
# make fuzz   an hour of random programs, with plain DDP and with the hook; FUZZ_OPTIONS='--seeds 0:5000' or others
# make matrix  build and test with every supported torch, each in an environment of its own; gigabytes, an hour
# make check  the linters
# make reference  docs/reference.md from the docstrings
# make wheel   a source distribution and a wheel in dist/; make wheels one for each of TORCH_VERSIONS
# make cuda-compile  compile the CUDA kernels alone, and check what calls them: no GPU and no torch with CUDA needed,
#                    only nvcc
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

.PHONY: demo test test-all test-asan test-tsan fuzz matrix check format build wheel wheels install-wheel cuda-compile reference clean

demo: build
	$(BIN)/python examples/demo.py $(DEMO_OPTIONS)

# From another folder, so that what is tested is what is installed: this checkout, or with INSTALL=install-wheel a wheel.
# What only tests use is built in the checkout in any case.
INSTALL ?= build
# Two files at once, each in a process with ranks of its own: one alone leaves a third of two cores idle.
# TEST_OPTIONS='-n 0' runs all in one process.
test: build $(INSTALL) $(TRAINERS)
	cd tests && $(abspath $(BIN))/python -m pytest -n 2 --dist loadfile $(TEST_OPTIONS)

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

$(STAMP): pyproject.toml setup.py ddp_hooks/_version.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH) numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'setuptools>=77' wheel ninja
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[dev]'
	touch $@

$(TRAINERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'ddp_hooks[integrations]'
	touch $@

# From the source distribution, so that what is in that is enough.
DIST ?= dist
wheel: $(STAMP)
	rm -rf $(DIST)
	$(BIN)/python setup.py --quiet sdist --dist-dir $(DIST)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir $(DIST) \
	  $(DIST)/*.tar.gz

install-wheel: wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall $(DIST)/*.whl

# One for each torch, in dist/; each in an environment of its own, because a wheel runs with the torch it was built for.
# The checkout is built for the last of them afterwards; `make build` puts that right.
TORCH_VERSIONS ?= $(shell $(PYTHON) -c 'import runpy; print(*runpy.run_path("ddp_hooks/_version.py")["TESTED_TORCH"])')
wheels:
	for version in $(TORCH_VERSIONS); do \
	  $(MAKE) wheel VENV=build/venv-$$version TORCH=torch==$$version DIST=build/dist-$$version || exit 1; \
	done
	mkdir -p dist
	cp build/dist-*/* dist/

check: $(STAMP) $(TRAINERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# So that the kernels do not rot where torch has no CUDA, nor what calls them, which any torch can check. Nothing is kept.
NVCC ?= nvcc
CUDA_ARCH ?= sm_90
NVCC_FLAGS := -std=c++20 -O3 -Icsrc -arch=$(CUDA_ARCH) -Werror all-warnings -Xptxas -warn-spills \
  -Xcompiler -Wall,-Wextra,-Werror
TORCH_HEADERS = $(shell $(BIN)/python -c \
  'from torch.utils.cpp_extension import include_paths; print(*("-isystem " + path for path in include_paths()))')
cuda-compile: $(STAMP)
	@for file in csrc/kernels/*.cpp; do \
	  echo "$(CXX) -fsyntax-only -DDDP_HOOKS_WITH_CUDA $$file"; \
	  $(CXX) -std=c++20 -fsyntax-only -Wall -Wextra -Werror -DDDP_HOOKS_WITH_CUDA -Icsrc $(TORCH_HEADERS) "$$file" || exit 1; \
	done
	@if command -v $(NVCC) >/dev/null; then \
	  for file in csrc/kernels/cuda/*.cu; do \
	    echo "$(NVCC) $$file"; $(NVCC) $(NVCC_FLAGS) -c "$$file" -o /dev/null || exit 1; \
	  done; \
	else \
	  echo "$(NVCC) is not found, so the CUDA kernels were not compiled"; \
	fi

clean:
	rm -rf build dist *.egg-info ddp_hooks/*.so ddp_hooks_testing/*.so ddp_hooks/_build_info.py $(VENV)
