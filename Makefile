# `make demo` and `make test` install what they need, once, outside of this folder. Only `make test-cluster` installs
# packages of the system, where it may.
PYTHON ?= python3
BACKENDS := torch mxnet oneflow horovod
# What tools keep for their next run goes there too: this folder may be read-only.
CACHE := $(or $(UNIDIST_HOME),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/unidist)/tools
export RUFF_CACHE_DIR := $(CACHE)/ruff
export MYPY_CACHE_DIR := $(CACHE)/mypy
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis
# The tests start thousands of processes: each would compile unidist anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-pythons test-cluster lint docs bench soak

demo:  ## train the example on two processes
	$(PYTHON) -m unidist setup --yes torch
	$(PYTHON) -m unidist run --backend torch --nproc 2 examples/train.py

PYTEST = "$$($(PYTHON) -m unidist setup dev --print-python)" -m pytest -n 3 --dist loadfile -o cache_dir="$(CACHE)/pytest"

test: lint  ## everything that one host can run, on every framework
	$(PYTHON) -m unidist setup --yes $(BACKENDS) docs
	$(PYTEST) --ignore=tests/cluster

test-pythons:  ## the core on the other Pythons that it supports, as far as they are on this machine
	$(PYTHON) tests/on_pythons.py "$(CACHE)/pythons" 3.10 3.12 3.13

test-cluster:  ## what needs several hosts, which are network namespaces of this one
	tests/cluster/install
	$(PYTHON) -m unidist setup --yes dev $(BACKENDS)
	$(PYTEST) tests/cluster

lint:
	$(PYTHON) -m unidist setup dev
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m ruff check .
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m ruff format --check .
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m mypy

SITE ?= $(CACHE)/site

docs:  ## the site, which can be read from the disk
	$(PYTHON) -m unidist setup docs
	"$$($(PYTHON) -m unidist setup docs --print-python)" -m mkdocs build --strict --site-dir "$(SITE)"
	@echo "open $(SITE)/index.html"

bench:  ## the numbers in docs/costs.md
	$(PYTHON) -m unidist setup torch
	$(PYTHON) -m unidist bench step --backend torch
	$(PYTHON) -m unidist bench launch --backend torch

soak:  ## kill a worker, a server, the scheduler and the launcher at random moments, 20 times each
	$(PYTHON) -m unidist setup mxnet
	UNIDIST_SOAK=20 "$$($(PYTHON) -m unidist setup dev --print-python)" -m pytest -s tests/test_launch_soak.py
