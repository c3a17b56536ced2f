# `make bench` and `make test` set up what they need in .venv and run. See `make help`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Settings, all of which the command line can override.
VENV ?= .venv
# SYSTEM=1: use the frameworks of $(PYTHON) as they are and install nothing.
SYSTEM ?= 0
BENCH_ARGS ?=
PYTEST_ARGS ?=

# python3 where it is new enough, else the newest of the others.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$python; break; fi; done)

# 1 with an NVIDIA GPU. GPU=0 on such a machine sets up and runs the CPU routes.
GPU ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo 1 || echo 0)

ifeq ($(GPU),1)
# The driver says which major version of CUDA it can run; it picks the build of JAX.
CUDA ?= $(shell nvidia-smi 2>/dev/null | grep -Eo 'CUDA[A-Za-z ]* Version: *[0-9]+' \
	| grep -Eo '[0-9]+$$' | head -n 1)
CONSTRAINTS := constraints-gpu.txt
EXTRAS := torch,cuda$(if $(filter 12,$(CUDA)),12,13),jax-triton,bench,peers,test,lint,docs
KIND := gpu
# One process: the frameworks share one GPU.
JOBS ?= 0
else
CONSTRAINTS := constraints-cpu.txt
EXTRAS := torch,jax,bench,peers,examples,test,lint,docs
KIND := cpu
JOBS ?= 2
endif

ifeq ($(SYSTEM),1)
PY := $(PYTHON)
READY := check-python
else
PY := $(VENV)/bin/python
READY := $(VENV)/ready-$(KIND)
endif

# JAX would take 75 % of the GPU's memory at its first use and leave PyTorch the rest.
export XLA_PYTHON_CLIENT_PREALLOCATE ?= false

.PHONY: help setup check-python bench test lint docs matrix gpu-compile clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo "Settings: PYTHON=$(PYTHON) GPU=$(GPU) VENV=$(VENV) SYSTEM=$(SYSTEM) JOBS=$(JOBS)"
	@echo "          BENCH_ARGS='...' PYTEST_ARGS='...'"
	@echo "SYSTEM=1 uses the packages that PYTHON already has and installs nothing."

check-python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one with PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "PYTHON=$(PYTHON) is not Python 3.11 or newer"; exit 1; }

# The stamp is written last, so that an interrupted installation is taken up again.
$(VENV)/ready-cpu $(VENV)/ready-gpu: pyproject.toml constraints-cpu.txt constraints-gpu.txt | check-python
	@echo "==> Setting up $(VENV) ($(KIND): $(EXTRAS)); the first time this downloads the frameworks"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	echo "Could not make a virtual environment (on Debian: apt install python3-venv)"; exit 1; }
	@rm -f $(VENV)/ready-*
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	@touch $@

setup: $(READY) ## set up .venv (the other commands do it when it is needed)
	@echo "==> Ready: $$($(PY) --version), $(KIND)"

bench: $(READY) ## measure every implementation side by side (BENCH_ARGS=...)
	@echo "==> Bench ($(KIND)): $(PY) -m bench $(BENCH_ARGS)"
	@$(PY) -m bench $(BENCH_ARGS)

test: $(READY) ## run the parity suite (PYTEST_ARGS=..., JOBS=processes)
	@echo "==> Parity suite ($(KIND), $(JOBS) extra processes)"
	@$(PY) -m pytest --numprocesses $(JOBS) --dist worksteal --timeout 600 $(PYTEST_ARGS)

lint: $(READY) ## lint, format check, type check
	@echo "==> ruff check"
	@$(PY) -m ruff check .
	@echo "==> ruff format --check"
	@$(PY) -m ruff format --check .
	@echo "==> mypy"
	@$(PY) -m mypy

docs: $(READY) ## build the documentation in build/docs, warnings as errors
	@echo "==> Documentation: build/docs/index.html"
	@# Afresh: what a page warned of the last time would not be said again.
	@JAX_PLATFORMS=cpu $(PY) -m sphinx -b html --fresh-env --fail-on-warning --keep-going --quiet \
		docs build/docs

matrix: ## a smoke test on each of Python 3.11 to 3.13 that this machine has
	@.ci/matrix

gpu-compile: $(READY) ## compile every kernel for Hopper and Blackwell without a GPU (downloads a plugin)
	@echo "==> Compiling for Hopper and Blackwell"
	@$(PY) -m parity_tests.gpu_compile $(GPU_COMPILE_ARGS)

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
