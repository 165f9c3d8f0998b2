# Everything runs in a private virtual environment that the first target sets up; later calls find it ready.
#
#   make demo              train a small GPT with stock attention, then with ours, and compare
#   make test              all tests that this machine can run, of the slow ones a part in which everything occurs
#   make test-all          the same without parts, and test-extended: an hour or more
#   make lint / format     check files with ruff / let ruff rewrite them
#   make typecheck         mypy on the plugin
#   make gpu-test          the GPU tests alone
#   make test-torch-2.11   the CPU tests and the interpreter's on another PyTorch (2.11 to 2.14), in a .venv of its own
#   make bench             the benchmarks; results go to benchmarks/results
#   make clean             remove what the targets above made
#
# Settings, each as NAME=value on the command line:
#   PYTHON=python3.12      the Python to start from (default: python3)
#   TORCH='torch==2.14.1'  another PyTorch
#   NO_VENV=1              use PYTHON's own environment and the torch in it (a GPU machine that has one already);
#                          this package goes in as an editable install, and nothing that is there is replaced
#   OFFLINE=1              with NO_VENV=1: install this package alone, ask no package index

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# For builds of torch that bring no Triton (CPU builds): the version that torch's CUDA build of the same number requires,
# which is kept where it is there already. (The interpreter of Triton 3.6 fails with NumPy 2.4 and later, 3.7's does not.)
TRITON ?= triton==3.7.1
# Likewise the CUDA compiler that CUDA builds of torch bring, for the tests that compile the CUDA kernels.
NVRTC ?= nvidia-cuda-nvrtc==13.0.88
EXTRAS ?= test,lint,bench,examples,transformers
WORKERS ?= 2
# A worker that has nothing left takes from the others.
DISTRIBUTED = -n $(WORKERS) --dist worksteal
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
TRAINING_ARGS ?=

SOURCES := torch_flashbackend kernels tests examples benchmarks

ifdef NO_VENV
  PY := $(PYTHON)
  CLANG_FORMAT := clang-format
  STAMP := build/.environment-ready
else
  PY := $(VENV)/bin/python
  CLANG_FORMAT := $(VENV)/bin/clang-format
  STAMP := $(VENV)/.environment-ready
endif

ifdef OFFLINE
  PIP_FLAGS := --no-deps --no-index
endif
# Byte code is left to the first import: of the thousands of files that torch and the others bring, few are ever read.
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-cpu test-gpu test-interpreter test-extended gpu-test lint format typecheck bench clean

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
ifndef NO_VENV
	@echo "Setting up $(VENV) with $(TORCH): minutes the first time, nothing later"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "$(TORCH)" "setuptools>=77.0.3"
	@$(PY) -c "import sys, importlib.util as u; sys.exit(sys.platform == 'linux' and u.find_spec('triton') is None)" \
	  || { set -x; $(INSTALL) "$(TRITON)"; }
	@$(PY) -c "import sys; from importlib.metadata import distributions as d; \
	  sys.exit(sys.platform == 'linux' and not any(x.name.startswith('nvidia-cuda-nvrtc') for x in d()))" \
	  || { set -x; $(INSTALL) "$(NVRTC)"; }
endif
	$(INSTALL) $(PIP_FLAGS) --no-build-isolation --editable ".[$(EXTRAS)]"
	@mkdir -p $(dir $(STAMP)) && touch $(STAMP)

demo: $(STAMP)
	$(PY) examples/demo.py $(DEMO_ARGS)

test: test-cpu test-gpu test-interpreter

test-all: export FLASHBACKEND_ALL_CASES = 1
test-all: test test-extended

# One thread in each worker: two workers with a thread pool each would only get in each other's way.
test-cpu: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(DISTRIBUTED) tests --ignore=tests/gpu --ignore=tests/interpreter $(PYTEST_ARGS)

test-gpu: $(STAMP)
	@if $(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then set -x; $(PY) -m pytest tests/gpu $(PYTEST_ARGS); \
	else echo "No GPU that torch can use: tests/gpu not run"; fi

# Triton reads TRITON_INTERPRET when a kernel is decorated, so these tests need a process of their own.
test-interpreter: $(STAMP)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PY) -m pytest $(DISTRIBUTED) tests/interpreter $(PYTEST_ARGS)

# What is too slow for every change: C++ compilers, many processes.
test-extended: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m extended tests --ignore=tests/gpu --ignore=tests/interpreter $(PYTEST_ARGS)

# The latest release of that number, from whatever index pip has: CPU builds where PIP_EXTRA_INDEX_URL names theirs.
test-torch-%:
	$(MAKE) test-cpu test-interpreter VENV=$(VENV)-torch-$* TORCH='torch==$*.*'

gpu-test: $(STAMP)
	$(PY) -m pytest tests/gpu $(PYTEST_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(CLANG_FORMAT) --dry-run --Werror kernels/cuda/*.cu kernels/cuda/*.cuh

format: $(STAMP)
	-$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)
	$(CLANG_FORMAT) -i kernels/cuda/*.cu kernels/cuda/*.cuh

typecheck: $(STAMP)
	$(PY) -m mypy

bench: $(STAMP)
	$(PY) -m benchmarks.attention $(BENCH_ARGS)
	$(PY) -m benchmarks.special $(BENCH_ARGS)
	$(PY) -m benchmarks.errors $(BENCH_ARGS)
	$(PY) -m benchmarks.decode $(BENCH_ARGS)
	$(PY) -m benchmarks.paged $(BENCH_ARGS)
	$(PY) -m benchmarks.deterministic $(BENCH_ARGS)
	$(PY) -m benchmarks.batch_invariance $(BENCH_ARGS)
	$(PY) -m benchmarks.varlen $(BENCH_ARGS)
	$(PY) -m benchmarks.overhead $(BENCH_ARGS)
	$(PY) -m benchmarks.training $(TRAINING_ARGS)
	$(PY) -m benchmarks.memory $(BENCH_ARGS)
	-$(PY) -m benchmarks.encoder_weights
	$(PY) -m benchmarks.encoder $(BENCH_ARGS)
	$(PY) -m benchmarks.generate $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(VENV)-torch-* build dist demo_out .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
