# make demo    train LeNet-5 on real images over four workers, beside the sequential network
# make test    lint, type-check and run all tests: threads, gloo and MPI
# make sweep   the products of cases of which make test runs a part (a few minutes)
# make fuzz    CASES=20000: random programs with new seeds, each equal or the same error on all workers
# make models  train other people's models on every split that the tests know (an hour)
# make tried   programs of other people's libraries, alone and distributed, each compared; written to docs/details/tried.md
# make soak    a long training, killed and resumed on other workers; STEPS=20000 (half an hour)
# make hosts   training over two hosts (network namespaces) whose link fails, is slow, loses packets (10 minutes)
# make faults  every fault that the tests inject, several times, counted by back-end (6 minutes)
# make newest  the tests with the newest torch and NumPy that pip finds, not those of constraints.txt (20 minutes)
# make matrix  the sdist and wheel, tried in an empty environment for each of PYTHONS (TORCH="torch==2.13.*" chooses torch)
# make lint    ruff and mypy alone
# make bench   time against the transports, of whole models, written to benchmarks/results, and of compiled steps (an hour)
# make docs    the documentation, in docs/_build
# make pages   the built documentation: its links, and its pages as a headless Chromium shows them
# make tutorials   only runs the tutorials of the documentation (a minute)
# make audit   the installed dependencies against constraints.txt, without a network
#
# Each makes .venv and installs what it needs. PYTHON=... chooses the interpreter (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
STEPS ?= 20000
PYTHONS ?= $(PYTHON)
TORCH ?= torch
# what lint reads: the files that git tracks, or without git, as in an archive, those of a release
CODE = $(or $(wildcard $(shell git ls-files '*.py' '*.md' 2>/dev/null)),\
	README.md CHANGELOG.md .ci benchmarks docs examples src tests tools)

.PHONY: demo test sweep fuzz models tried soak hosts faults newest matrix lint bench docs pages tutorials audit clean

demo: $(VENV)/demo.installed
	$(BIN)/python examples/lenet_digits.py

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

sweep: $(VENV)/test.installed
	$(BIN)/python -m pytest -n 2 -m every_case

fuzz: $(VENV)/test.installed
	PYTHONPATH=tests $(BIN)/python tests/fuzz/campaign.py $(or $(CASES),2000) $(SEED)

models: $(VENV)/test.installed
	$(BIN)/python -m pytest -m 'every_model or not every_model' tests/models

tried: | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/tried
	$(VENV)/tried/bin/python -m pip install --quiet --disable-pip-version-check -c tests/tried/constraints.txt -e .
	$(VENV)/tried/bin/python tests/tried/run.py $(FILES)

soak: $(VENV)/test.installed
	PYTHONPATH=tests/backends $(BIN)/python tests/checkpoint/soak.py --steps $(STEPS)

hosts: $(VENV)/test.installed
	PYTHONPATH=tests/backends $(BIN)/python tests/hosts/endure.py

faults: $(VENV)/test.installed
	$(BIN)/python tools/faults.py

newest: | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/newest
	grep -vE '^(torch|torchvision|numpy)==' constraints.txt > $(VENV)/newest/constraints.txt
	$(VENV)/newest/bin/python -m pip install --quiet --upgrade -c $(VENV)/newest/constraints.txt -e '.[test]'
	$(VENV)/newest/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# outside of the repository, so that nothing but the wheel is found
matrix: | $(BIN)/python
	rm -rf dist $(VENV)/matrix
	$(PYTHON) -m venv $(VENV)/matrix/build
	$(VENV)/matrix/build/bin/python -m pip install --quiet --disable-pip-version-check build
	$(VENV)/matrix/build/bin/python -m build --outdir dist .
	set -e; for python in $(PYTHONS); do \
		$$python -m venv $(VENV)/matrix/$$(basename $$python); \
		$(VENV)/matrix/$$(basename $$python)/bin/python -m pip install --quiet --disable-pip-version-check \
			dist/*.whl '$(TORCH)'; \
		$(VENV)/matrix/$$(basename $$python)/bin/python tools/smoke.py; \
	done

lint: $(VENV)/test.installed
	$(BIN)/ruff check pyproject.toml $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

bench: $(VENV)/bench.installed
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/programs.py

docs: $(VENV)/docs.installed
	$(BIN)/python -m sphinx -W -b html docs docs/_build

tutorials: $(VENV)/docs.installed
	set -e; for script in docs/tutorials/plot_*.py; do \
		echo "$$script"; MPLBACKEND=agg timeout 120 $(BIN)/python "$$script"; \
	done

pages: docs
	$(BIN)/python tools/pages.py docs/_build

audit: $(VENV)/test.installed
	$(BIN)/python tools/audit.py

$(VENV)/%.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) docs/_build docs/gallery .mypy_cache .ruff_cache .hypothesis
