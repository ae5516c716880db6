# Every target works from a fresh clone: it makes .venv and installs what it needs by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export HF_HUB_OFFLINE ?= 0

.DEFAULT_GOAL := help
.PHONY: help install demo test test-unit test-distributed lint format type protos manifests verify bench clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch goes first and by version, so that nothing else chooses a build of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d; say make PYTHON=…" % v[:2])'
	@echo "Installing into $(VENV) (once; some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP) ## Make .venv with everything that development needs

demo: $(STAMP) ## Serve SmolLM2 on two CPU ranks of this machine and let it answer a question
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	@$(BIN)/hetero run examples/smollm2-cpu.yaml --temperature 0 "In three sentences, explain why the sky is blue."

test: test-unit test-distributed ## Run all tests that CI runs

test-unit: $(STAMP) ## Run the tests that start no processes
	$(BIN)/pytest tests/unit -n 2 -q

test-distributed: $(STAMP) ## Run the tests with real rank processes and the real model, one after another
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/pytest tests/distributed -q

lint: $(STAMP) ## Check style and the architecture's import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP) ## Check types, strictly
	$(BIN)/mypy operator/hetero_operator worker/hetero_gateway worker/hetero_worker worker/hetero_client protos/hetero_api tools tests bench

protos: $(STAMP) ## Generate the protobuf and gRPC stubs
	$(BIN)/python tools/generate.py protos

manifests: $(STAMP) ## Generate the CRD from hetero_api/spec.py
	$(BIN)/python tools/generate.py manifests

verify: $(STAMP) ## Fail when generated files differ from their sources
	$(BIN)/python tools/generate.py --check protos manifests

bench: $(STAMP) ## Measure against transformers and this machine's limits; writes bench/results
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.run

clean: ## Remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
