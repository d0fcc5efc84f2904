# make test is what CI runs. Everything is installed into .venv, at the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Set in many containers: every process would compile torch, transformers and merakc anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install lint test gpu-check demo

help:
	@echo "make install   create .venv and install merakc into it, editable, with its tools"
	@echo "make lint      ruff, import-linter and mypy"
	@echo "make test      lint, then the tests"
	@echo "make gpu-check kernels, equality and speed on this machine's GPUs"
	@echo "make demo      a small end-to-end run on this machine's CPU"

install: $(STAMP)

# Modules are compiled when they are first imported: most never are.
# Triton, with which torch for CPUs does nothing, lies apart: see benchmarks/gpu_path/kernels.py.
# torch goes first and alone: the rest of the resolution then starts from the build that is there.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --no-compile "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --no-compile --no-deps --target .venv/triton "$$(grep '^triton==' constraints.txt)"
	touch $@

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile

gpu-check: install
	$(BIN)/merakc doctor --gpu -o gpu-report.html -o gpu-report.json

demo: install
	$(BIN)/python -m benchmarks.demo
