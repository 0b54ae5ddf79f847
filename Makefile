# Every target makes .venv and installs what it needs by itself, on a fresh machine too.
#
#   make demo         train a small classifier from .npy and .zarr through the pipeline
#   make test         all tests that need no GPU and no patience
#   make test-long    the long searches, kills and files; a million schedules of the pipeline (hours)
#   make test-schedules SCHEDULES=20000    that many schedules and nothing else
#   make test-gpu     what needs a CUDA device
#   make test-recipes docs/recipes.md with the libraries that it is about, which are installed for it
#   make lint         style, types, layers
#   make wheel-check  build the wheel, install it in a bare environment, use it
#
# PYTHON= picks the interpreter (3.11 or later). TORCH= is a requirement that is installed first,
# for a torch other than the default: make test TORCH="torch==2.13.0"

PYTHON ?= python3
TORCH ?=
SCHEDULES ?= 1000000
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# One stamp for each TORCH, so that another requirement is not taken for installed.
STAMP := $(VENV)/installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)

.DEFAULT_GOAL := test
.PHONY: install demo test test-long test-schedules test-gpu test-recipes lint wheel-check clean

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/pip install '$(TORCH)')
	$(BIN)/pip install -e '.[dev]'
	touch $@

demo: install
	$(BIN)/rowferry demo

test: install
	$(BIN)/pytest

test-long: install
	ROWFERRY_SCHEDULES=$(SCHEDULES) $(BIN)/pytest -m "long and not gpu" --timeout 86400

test-schedules: install
	ROWFERRY_SCHEDULES=$(SCHEDULES) $(BIN)/pytest -m "long and not gpu" --timeout 86400 tests/pipeline/test_exactness.py

test-gpu: install
	$(BIN)/pytest -m "gpu and not long"

# torch stays the one that is installed. fastai brings torchvision, and PyPI's is built for CUDA: beside a torch for the CPU its
# import fails, and with it those of libraries that look for it. Nothing here uses it.
test-recipes: install
	$(BIN)/pip install -e '.[recipes]' "torch==$$($(BIN)/python -c 'import torch; print(torch.__version__)')"
	$(BIN)/python -c 'import torchvision' || $(BIN)/pip uninstall --yes torchvision
	ROWFERRY_RECIPES=accelerate,fastai,lightning,torch_geometric $(BIN)/pytest -rs -k 'recipe or lightning' tests/test_docs.py tests/pipeline/test_trainers.py

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel-check: install
	TORCH='$(TORCH)' .ci/check-wheel $(BIN)/python

clean:
	rm -rf $(VENV) build dist demo-data src/*.egg-info
