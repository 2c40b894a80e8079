# train and test are all that a fresh machine needs: Python 3.11 or newer, make, bash.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test chaos cluster check bench clean

train: .venv/installed  ## ResNet-18 on handwritten digits, two CPU ranks, about a minute
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node=2 -m ddp_trainer experiment=digits_resnet18

test: .venv/installed  ## every law, with real processes
	$(BIN)/pytest -m "not chaos and not cluster"

chaos: .venv/installed  ## kill, stop, cut, flip and fill up what can be; a table of what was lost
	$(BIN)/pytest tests/chaos

cluster: .venv/installed-sweep  ## SLURM, hosts of network namespaces and a container build; as root, on Debian
	$(BIN)/pytest tests/cluster

check: .venv/installed  ## style and types; shellcheck is Debian's
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	shellcheck launch/* .ci/run docs/images/*.sh benchmarks/*.sh

bench: .venv/installed-bench  ## side by side with plain DDP, Lightning and Accelerate, interleaved
	$(BIN)/python benchmarks/compare.py --model lenet
	$(BIN)/python benchmarks/compare.py --model resnet18

clean:  ## all that make has made
	rm -rf .venv outputs build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamped last: an installation that was cut short is taken up again, a finished one is not repeated.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

.venv/installed-sweep: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[sweep]'
	@touch $@

.venv/installed-bench: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	@touch $@
