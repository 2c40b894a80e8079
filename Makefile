# train and test are all that a fresh machine needs: Python 3.11 or newer, make, bash.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test check clean

train: .venv/installed  ## ResNet-18 on handwritten digits, two CPU ranks, a minute
	$(BIN)/torchrun --nproc_per_node=2 -m ddp_trainer experiment=digits_resnet18

test: .venv/installed  ## every law, with real processes
	$(BIN)/pytest

check: .venv/installed  ## style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

clean:
	rm -rf .venv outputs build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
