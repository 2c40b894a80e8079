# A new machine needs Python 3.11 or newer, make and bash; then `make train` and `make test` work.
# TORCH=cpu installs PyTorch's CPU build, 200 MB in place of 5.6 GB, from PyTorch's own index. uv is used where it is.
PYTHON ?= python3
TORCH ?=
BIN := .venv/bin
UV := $(shell command -v uv)
VENV := $(if $(UV),uv venv --quiet --allow-existing --python $(PYTHON) .venv,$(PYTHON) -m venv .venv)
PIP := $(if $(UV),uv pip install --quiet --python $(BIN)/python,$(BIN)/pip install --quiet --no-compile --disable-pip-version-check) \
	--constraint constraints.txt
# On all cores: pip uses one, and uv compiles nothing.
COMPILE := @$(BIN)/python -m compileall -qq -j 0 .venv/lib || true

.PHONY: install train test chaos stress cluster cluster-parallel cluster-alone bench clean
.PHONY: check check-format check-lint check-types check-shell

install: .venv/installed  ## Python environment in .venv

train: .venv/installed  ## ResNet-18 on handwritten digits, two CPU ranks; the README says how long it takes
	NPROC=2 launch/local.sh experiment=digits_resnet18 device=cpu

test: .venv/installed  ## the tests, with real processes
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not chaos and not cluster" \
		--ignore=tests/chaos --ignore=tests/cluster $(PYTEST_OPTIONS)

chaos: .venv/installed  ## kill ranks and jobs, damage files, fill the disk; TRIALS=full: each fault as often as the docs say
	$(BIN)/pytest -n 4 -m "chaos and not cluster" $(PYTEST_OPTIONS) \
		tests/chaos $$(grep -rl --include="test_*.py" --exclude-dir=cluster --exclude-dir=chaos "mark\.fault\|mark\.chaos" tests)

stress: .venv/installed  ## the tests and the chaos beside two processes that keep the cores busy
	@trap 'kill $$busy' EXIT INT TERM; for _ in 1 2; do yes > /dev/null & busy="$$busy $$!"; done; \
	$(MAKE) --keep-going test chaos

cluster: cluster-parallel cluster-alone  ## tests on SLURM, network namespaces and a container build; as root, on Debian

cluster-parallel: .venv/installed-sweep
	$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder tests/cluster -m "not alone" $(PYTEST_OPTIONS)

cluster-alone: .venv/installed-sweep
	$(BIN)/pytest tests/cluster -m alone $(PYTEST_OPTIONS)

check: check-format check-lint check-types check-shell  ## needs Debian's shellcheck

check-format: .venv/installed
	$(BIN)/ruff format --check .

check-lint: .venv/installed
	$(BIN)/ruff check .

check-types: .venv/installed
	$(BIN)/pyright

check-shell:
	shellcheck launch/* .ci/run docs/images/*.sh benchmarks/*.sh

bench: .venv/installed-bench  ## compare with plain DDP, Lightning and Accelerate in interleaved rounds
	$(BIN)/python benchmarks/compare.py --model lenet
	$(BIN)/python benchmarks/compare.py --model resnet18

clean:  ## remove everything that make has created
	rm -rf .venv outputs build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The file is created last, so that an interrupted installation is continued and a finished one is not repeated.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(VENV)
	$(if $(TORCH),$(PIP) --index-url https://download.pytorch.org/whl/$(TORCH) torch torchvision)
	$(PIP) --editable '.[dev]'
	$(COMPILE)
	@touch $@

.venv/installed-sweep: .venv/installed
	$(PIP) --editable '.[sweep]'
	$(COMPILE)
	@touch $@

.venv/installed-bench: .venv/installed
	$(PIP) --editable '.[bench]'
	$(COMPILE)
	@touch $@
