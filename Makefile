# Two commands on a fresh machine: `make demo` runs the main job, `make test` the tests. Both install into .venv first.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test check format bench

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile

install: $(STAMP)  ## .venv with scaletool and everything it needs

# Written last, so an interrupted installation is repeated. Without ensurepip (Debian's python3 without python3-venv)
# the pip of the system, where there is one, fills the environment.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "scaletool needs Python 3.10 or newer as $(PYTHON); name another with: make PYTHON=/path/to/python3" >&2; exit 4; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  rm -rf $(VENV); \
	  if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	  elif $(PYTHON) -m pip --version >/dev/null 2>&1 && $(PYTHON) -m venv --without-pip $(VENV); then \
	    $(PYTHON) -m pip --python $(PY) install -qq pip; \
	  else \
	    echo "$(PYTHON) cannot make a virtual environment: its ensurepip module is missing." >&2; \
	    echo "hint: install it (Debian, Ubuntu: apt-get install python3-venv), or name another Python: make PYTHON=/path/to/python3" >&2; \
	    exit 4; \
	  fi; }
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PY) -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)  ## a small sweep: 1 and 2 processes, ddp and zero2, both modes; again: shows its table
	$(VENV)/bin/scaletool sweep --gpus 1,2 --profiles ddp,zero2 --modes custom,trainer --rounds 3 --steps 15 \
	  --out runs/demo $(if $(wildcard runs/demo),--resume)

test: $(STAMP)  ## all tests; PYTEST_ARGS="tests/unit -k stats" for some
	$(PY) -m pytest --durations=10 $(PYTEST_ARGS)

check: $(STAMP)  ## format, lint, types, import contracts: what CI holds
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(STAMP)  ## rewrite the sources as `check` wants them
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(STAMP)  ## scaletool against its peers, 25 minutes on a quiet machine: runs/bench/results.json, docs/benchmarks.md
	$(PY) -m benchmarks.run
