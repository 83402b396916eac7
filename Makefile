# `make demo` and `make test` set themselves up: the first call makes $(VENV), later calls find it ready.
#
#   make demo [seed=N]        nine teachers into one student, on this machine
#   make test [ARGS="-k x"]   the tests, but for those that need SGLang
#   make test-sglang          the tests that need SGLang, on real servers; the first call makes $(SGLANG_VENV)
#   make bubblewrap           installs the program bwrap where it is absent, as root; make test does it too
#   make sglang               $(SGLANG_VENV) alone: SGLang on a machine without a GPU
#   make check                lint, format, types, every example configuration
#   make format               apply lint fixes and formatting
#
# PYTHON=python3.12           another interpreter (3.11 or newer)
# VENV=/path                  an environment of yours: what it has and satisfies setup.py is kept
# CONSTRAINTS=                no pinned versions (a machine with a GPU)
# SGLANG_VENV=/path           another place for SGLang
# TORCH_INDEX=URL             where to look for a CPU-only torch first

PYTHON ?= python3.11
VENV ?= .venv
CONSTRAINTS ?= constraints/cpu.txt
SGLANG_VENV ?= .venv-sglang
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
# Modules are compiled when first imported (--no-compile): that halves the time of the installation.
INSTALL = $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check \
	$(if $(CONSTRAINTS),-c $(CONSTRAINTS)) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
DEMO := $(VENV)/.installed-demo
DEV := $(VENV)/.installed-dev
# What the tests compare with and nothing else may find: transformers imports torchao wherever it is.
ORACLES := $(VENV)/oracles

# Several ranks share the cores: one thread each, and the compiled modules kept between processes.
export OMP_NUM_THREADS := 1
unexport PYTHONDONTWRITEBYTECODE
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: demo test test-sglang sglang check format bubblewrap
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(DEMO)
	@$(BIN)/python -m examples.quickstart.demo $(if $(seed),seed=$(seed))

test: $(DEV) bubblewrap
	$(BIN)/python -m pytest -m "not sglang and not gpu and not slurm" $(ARGS)
ifeq ($(ARGS),)
	PYTHONPATH=$(ORACLES) $(BIN)/python -m pytest tests/oracles
endif

test-sglang: $(DEV) sglang
	MOPD_SGLANG_PYTHON=$(SGLANG_VENV)/bin/python $(BIN)/python -m pytest -m sglang tests/sglang $(ARGS)

bubblewrap:
	@command -v bwrap >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; } || { \
		echo "the tests of workspaces need bubblewrap: as root, apt-get install -y bubblewrap" >&2; exit 2; }

sglang:
	@PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) tools/setup_sglang_cpu.sh $(SGLANG_VENV)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/unit/test_config.py -k every_example

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	@$(PYTHON) -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "$(PYTHON) is absent, older than 3.11 or lacks the venv module: install Python 3.11 (Debian: python3.11-venv), or name another with PYTHON=..." >&2; exit 2; }
	@echo "making $(VENV) (a minute or two, once)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(DEMO): setup.py $(CONSTRAINTS) | $(BIN)/python
	@echo "installing into $(VENV)"
	@$(INSTALL) -e '.[embedded]'
	@touch $@

$(DEV): setup.py $(CONSTRAINTS) | $(BIN)/python
	@echo "installing into $(VENV), with what the tests and checks need"
	@$(INSTALL) -e '.[embedded,wandb,parquet,dev]'
	@# Compiled here: when tests import it, its invalid escape sequences would be errors.
	@$(filter-out --no-compile,$(INSTALL)) --upgrade --no-deps --target $(ORACLES) torchao
	@touch $(DEMO) $@
