# make train    train the default recipe (ARGS="+recipe=NAME key=value" for another)
# make test     lint, types, import contract, tests (TESTS="tests/parallel -k norm" for some)
# make lint     lint, types, import contract
# make install-checked   install what requirements.lock has the hashes of (Linux on x86-64), once and for all
PYTHON ?= python3
ARGS ?=
TESTS ?=
VENV := .venv
BIN := $(VENV)/bin
# torchrec asks for the kernels' CUDA build by name; tests on CPU ranks want the other one.
TABLES := torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0

.PHONY: train test lint style types tests format install-checked

train: $(VENV)/.installed
	$(BIN)/python -m trainer $(ARGS)

test: style
	$(MAKE) --jobs=2 --no-print-directory types tests

tests: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TESTS)

lint: style types

types: $(VENV)/.installed
	$(BIN)/mypy

style: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/codespell

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.installed: pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TABLES) || \
		echo "no $(TABLES) for this machine: tests of tables that are divided by rows are left out"
	touch $@

install-checked:
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	touch $(VENV)/.installed
