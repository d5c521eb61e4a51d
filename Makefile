# Two commands: `make demo` and `make test`. Both install what they need, once, outside of this folder.
PYTHON ?= python3
BACKENDS := torch mxnet oneflow horovod

.PHONY: demo test lint bench

demo:  ## train the example on two processes
	$(PYTHON) -m unidist setup torch
	$(PYTHON) -m unidist run --backend torch --nproc 2 examples/train.py

test: lint  ## everything, on every framework
	tests/cluster/install
	$(PYTHON) -m unidist setup $(BACKENDS)
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m pytest -n 2 --dist loadfile

lint:
	$(PYTHON) -m unidist setup dev
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m ruff check .
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m ruff format --check .
	"$$($(PYTHON) -m unidist setup dev --print-python)" -m mypy

bench:  ## the numbers in the README
	$(PYTHON) -m unidist setup torch
	$(PYTHON) -m unidist bench step --backend torch
	$(PYTHON) -m unidist bench launch --backend torch
