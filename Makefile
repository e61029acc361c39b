# The commands of this project. Each sets up what it needs: a virtual environment in .venv, made once and renewed when
# requirements/ or setup.py change. Where pip finds its packages is pip's own configuration; one that offers the CPU
# wheel of torch (about 200 MB) saves the download of the CUDA one.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUN    := runs/quickstart
# Errors alone; and no compiling of files that are never imported, which is a third of the time.
PIP_FLAGS := -qq --no-compile

# Two processes on two cores: more threads each only wait for one another.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-fast checks format clean

help:
	@echo "make quickstart  PPO on a small model, on the CPU: from nothing to 90% in minutes (writes $(RUN)/)"
	@echo "make test        every test"
	@echo "make test-fast   the one-process tests, within a minute"
	@echo "make checks      ruff, mypy, import-linter, sizes"
	@echo "make clean       remove caches and runs/quickstart (the virtual environment stays)"

install: $(STAMP)

$(STAMP): requirements/cpu.txt requirements/dev.txt setup.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or later is needed; set one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing rlhf_mc and its requirements into $(VENV) (once; takes some minutes) ..."
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
# torch first and with its dependencies, since these differ between its builds; all else exactly as locked.
	@$(BIN)/python -m pip install $(PIP_FLAGS) torch==2.13.0 -c requirements/cpu.txt
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

quickstart: $(STAMP)
	$(BIN)/python tools/make_quickstart.py --output $(RUN)
	$(BIN)/python tools/convert_hf_to_mcore.py --hf-path $(RUN)/model_hf --output $(RUN)/model_mcore
	$(BIN)/torchrun --standalone --nproc-per-node 2 -m rlhf_mc configs/quickstart.yaml

test: $(STAMP)
	$(BIN)/python -m pytest tests --lanes 2 --durations=10

test-fast: $(STAMP)
	$(BIN)/python -m pytest tests/unit --lanes 3 --durations=5

checks: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_size.py rlhf_mc tools
	$(BIN)/python tools/check_language.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(RUN) build .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
