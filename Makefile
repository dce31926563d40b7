# make demo, make demo-opd, make test, make lint: each makes .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
DEMO_DIR ?= runs/demo
DEMO_OPD_DIR ?= runs/demo_opd

.PHONY: demo demo-opd test lint clean

# torch first and by itself: a CPU machine then keeps the wheel that its package index offers for it.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$$(sed -n 's/^ *"\(torch==[^"]*\)",/\1/p' pyproject.toml)"
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m torchtune_grpo.demo --seed $(SEED) --output-dir $(DEMO_DIR)

demo-opd: $(VENV)/installed
	$(BIN)/python -m torchtune_grpo.demo_opd --seed $(SEED) --output-dir $(DEMO_OPD_DIR)

test: $(VENV)/installed
	$(BIN)/python -m pytest

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) runs
