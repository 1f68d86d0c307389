# Short names for the commands that CONTRIBUTING.md explains. PYTHON picks another interpreter: make test PYTHON=python3.12
PYTHON ?= python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install format lint type test coverage test-gpu docs bench build

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## install the checkout, editable, with the tools and the tested versions
	$(PYTHON) -m pip install -c constraints.txt -e ".[dev,docs]"

format: ## sort imports and format the code
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

lint: ## check style, format and spelling, change nothing
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m codespell_lib

type: ## check types in the package, strictly
	$(PYTHON) -m mypy grpo_lit

test: ## run the tests that need neither GPU nor network (ARGS="-k loss" narrows them)
	$(PYTHON) -m pytest -n 2 --dist loadfile $(ARGS)

coverage: ## the same, counting the lines of the package that run, also in the commands that tests start
	COVERAGE_FILE="$(CURDIR)/.coverage" $(PYTHON) -m pytest -n 2 --dist loadfile --cov --cov-report= --cov-fail-under=0 $(ARGS)
	-$(PYTHON) -m coverage combine -q --append
	$(PYTHON) -m coverage report

docs: ## build the documentation site into docs/_build; a warning is an error
	$(PYTHON) -m sphinx -W --keep-going -q -b html docs docs/_build

test-gpu: ## run the tests that need a CUDA GPU
	$(PYTHON) -m pytest -m gpu $(ARGS)

bench: ## time the kernels against their torch references (ARGS="--help" lists the options)
	$(PYTHON) -m grpo_lit bench $(ARGS)

build: ## build the wheel and the source archive into dist/
	$(PYTHON) -m build
