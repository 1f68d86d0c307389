# Short names for the commands that CONTRIBUTING.md explains. PYTHON picks another interpreter: make test PYTHON=python3.12
PYTHON ?= python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install format lint type test test-gpu bench build

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## install the checkout, editable, with the tools and the tested versions
	$(PYTHON) -m pip install -c constraints.txt -e ".[dev]"

format: ## sort imports and format the code
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

lint: ## check style, format and spelling, change nothing
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m codespell_lib

type: ## check types in the package
	$(PYTHON) -m mypy grpo_lit

test: ## run the tests that need neither GPU nor network (ARGS="-k loss" narrows them)
	$(PYTHON) -m pytest $(ARGS)

test-gpu: ## run the tests that need a CUDA GPU
	$(PYTHON) -m pytest -m gpu $(ARGS)

bench: ## time the kernels against their torch references (ARGS="--help" lists the options)
	$(PYTHON) -m grpo_lit bench $(ARGS)

build: ## build the wheel and the source archive into dist/
	$(PYTHON) -m build
