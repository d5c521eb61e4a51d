# Two commands: `make demo` and `make test`. Both install what they need, once, outside of this folder.
PYTHON ?= python3
BACKENDS := torch mxnet oneflow horovod
# What tools keep for their next run goes there too: this folder may be read-only.
CACHE := $(or $(UNIDIST_HOME),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/unidist)/tools
export RUFF_CACHE_DIR := $(CACHE)/ruff
export MYPY_CACHE_DIR := $(CACHE)/mypy
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis

.PHONY: demo test lint bench soak

demo:  ## train the example on two processes
	$(PYTHON) -m unidist setup torch
	$(PYTHON) -m unidist run --backend torch --nproc 2 examples/train.py

test: lint  ## everything, on every framework
	tests/cluster/install
	$(PYTHON) -m unidist setup $(BACKENDS)
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m pytest -n 2 --dist loadfile -o cache_dir="$(CACHE)/pytest"

lint:
	$(PYTHON) -m unidist setup dev
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m ruff check .
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m ruff format --check .
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m mypy

bench:  ## the numbers in the README
	$(PYTHON) -m unidist setup torch
	$(PYTHON) -m unidist bench step --backend torch
	$(PYTHON) -m unidist bench launch --backend torch

soak:  ## kill a worker, a server, the scheduler and the launcher at random moments, 20 times each
	$(PYTHON) -m unidist setup mxnet
	UNIDIST_SOAK=20 "$$($(PYTHON) -m unidist setup dev --print-python)" -m pytest -s tests/test_launch_soak.py
