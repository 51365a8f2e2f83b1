# Everything a newcomer needs: make demo, make test. Everything a developer needs: make check, make bench.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo demo-text demo-kill test chaos-compressed check format bench clean setup

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Unisono and its packages into $(VENV) (the first time takes a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test,check]'
	@touch $@

demo: setup  ## the digit CNN on two workers, then on one: the same hash
	@$(BIN)/python examples/demo.py

demo-text: setup  ## a small language model on the source of Python's standard library
	@$(BIN)/python examples/demo.py --text

demo-kill: setup  ## two of four workers are killed on the way: the hash does not change
	@$(BIN)/python examples/07_killed.py

test: setup  ## the whole test suite
	$(BIN)/python -m pytest

chaos-compressed: setup  ## who dies, joins and leaves, once more with compressed gradients
	UNISONO_TEST_OPTIONS="--compress fp16" $(BIN)/python -m pytest $(addprefix tests/chaos/test_,$(addsuffix .py,\
	  recovery elastic leaving replacing several_hosts violent_deaths))

check: setup  ## formatter, linter, type checker, layering and size tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_house.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## against DistributedDataParallel and torchrun; takes about a quarter of an hour
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/ddp.py

clean:
	rm -rf $(VENV) runs dist build .hypothesis .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
