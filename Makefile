# Every target does its own set-up on a fresh machine: a virtual environment in .venv, made once and renewed when
# pyproject.toml or constraints.txt change.
#
#   make test PYTHON=python3.12                  another interpreter
#   make test WORLDS=2                           fewer world sizes for the distributed suite
#   make test-unit PYTEST_ARGS="-k windows"      arguments for pytest

PYTHON ?= python3
WORLDS ?= 2 3 4
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The distributed suite: pytest on every rank (tests/distributed/conftest.py keeps the ranks in step). Ranks share the
# checkout, hence no cache; -v names a test before it runs, so that a rank that dies shows in which.
RANKS = $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node
DISTRIBUTED = -m pytest tests/distributed -v -p no:cacheprovider

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-unit test-distributed test-slow test-gpu test-shared-gpu lint bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | while IFS="$$(printf '\t')" read -r target what; do \
	    printf '  make %-18s %s\n' "$$target" "$$what"; done

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "k3comm needs Python 3.11 or newer, and '$(PYTHON)' is not. Name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV) && $@ -m pip --version || { rm -rf $(VENV); exit 1; }

$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint constraints.txt
	@touch $@

setup: $(READY)  ## make .venv with everything that development needs

demo: $(READY)  ## what the library chooses, and why, on this machine
	$(BIN)/python -m k3comm demo

# One computing thread a process: the tests start more processes than there are cores. Ranks of one host talk over the
# loopback, whatever the host's name resolves to. NVLink multicast stays off in the project's own runs, because shared
# test hosts can be put out of service by it.
test test-unit test-distributed test-slow test-gpu test-shared-gpu: export OMP_NUM_THREADS := 1
test test-unit test-distributed test-slow test-gpu test-shared-gpu: export GLOO_SOCKET_IFNAME ?= lo
test test-unit test-distributed test-slow test-gpu test-shared-gpu: export NCCL_NVLS_ENABLE := 0
test test-unit test-distributed test-slow test-gpu test-shared-gpu: export TORCH_SYMM_MEM_DISABLE_MULTICAST := 1
test test-unit test-distributed test-slow test-gpu test-shared-gpu: export NVSHMEM_DISABLE_NVLS := 1
# Empty is unset: compiled modules are kept, or every rank and worker compiles the package, the tests and pytest's anew.
test test-unit test-distributed test-slow test-gpu test-shared-gpu: export PYTHONDONTWRITEBYTECODE :=

test:  ## the unit tests, then the distributed suite for each world size in WORLDS
	@$(MAKE) --no-print-directory test-unit
	@$(MAKE) --no-print-directory test-distributed

test-unit: $(READY)  ## the unit tests alone
	$(BIN)/python -m pytest tests/unit -n auto --benchmark-disable $(PYTEST_ARGS)

test-distributed: $(READY)  ## the distributed suite alone
	@set -e; for world in $(WORLDS); do \
	    echo "$(RANKS) $$world $(DISTRIBUTED) $(PYTEST_ARGS)"; \
	    $(RANKS) $$world $(DISTRIBUTED) $(PYTEST_ARGS); done

GPUS ?= 2
SHARED_WORLDS ?= 2 4 8
ON_GPUS = test_tiers.py test_cuda.py test_cuda_memory.py test_staged_cuda.py test_lane_cuda.py \
  test_tail_cuda.py test_overlap_cuda.py
ON_ONE_GPU = test_cuda_memory.py test_staged_cuda.py test_lane_cuda.py test_tail_cuda.py
test-gpu: $(READY)  ## every tier on GPUS GPUs of this machine, with NCCL
	$(RANKS) $(GPUS) -m pytest $(addprefix tests/distributed/,$(ON_GPUS)) --nccl -v -p no:cacheprovider $(PYTEST_ARGS)

test-shared-gpu: $(READY)  ## the tiers over device memory, with SHARED_WORLDS ranks on one GPU
	@set -e; for world in $(SHARED_WORLDS); do \
	    $(RANKS) $$world -m pytest $(addprefix tests/distributed/,$(ON_ONE_GPU)) --shared-gpu -v -p no:cacheprovider \
	    $(PYTEST_ARGS); done

# No slow test is not a failure here (pytest's exit status 5).
SLOW = $(BIN)/python -m pytest -m slow --collect-only -q
test-slow: $(READY)  ## the tests that `make test` leaves out
	@set -e; if $(SLOW) tests/unit; then $(BIN)/python -m pytest tests/unit -m slow $(PYTEST_ARGS); \
	    elif [ $$? -ne 5 ]; then exit 1; fi
	@set -e; if $(SLOW) tests/distributed; then for world in $(WORLDS); do \
	    $(RANKS) $$world $(DISTRIBUTED) -m slow $(PYTEST_ARGS); done; \
	    elif [ $$? -ne 5 ]; then exit 1; fi

lint: $(READY)  ## ruff (rules and format) and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy k3comm examples benchmarks

bench: $(READY)  ## what choosing and moving cost on this machine
	$(BIN)/python benchmarks/host.py

clean:  ## remove all that make has made, .venv too
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
