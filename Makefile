# Every target works from a fresh clone: it makes .venv and installs what it needs by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NATIVE := worker/hetero_worker/native/libhetero_compute.so
export HF_HUB_OFFLINE ?= 0
# Tests start hundreds of processes: where this is set, each of them would compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install native demo test test-rest test-all test-unit test-distributed test-sanitizers fuzz chaos soak test-healing test-release test-gpu test-cuda-wheel test-cluster test-e2e kubernetes bench-peers bench-peers-install bench-scaling bench-perplexity bench-engine bench-operator bench-recovery bench-exchange bench-exchange-hosts bench-prediction bench-cuts bench-gpu lint format type protos manifests docs site chart golden verify bench base-image images locks audit check-images record-images release clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch goes first and by version, so that nothing else chooses a build of it.
$(STAMP): pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Python 3.11 or newer is needed, this is %d.%d; say make PYTHON=…" % v[:2])'
	@echo "Installing into $(VENV) (once; some minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP) $(NATIVE) ## Make .venv with everything that development needs

# Built by the installation; again when its sources are newer. Ranks can do without, so a machine without a compiler goes on.
$(NATIVE): worker/hetero_worker/native/build.py $(wildcard worker/hetero_worker/distributed/*.[ch]) $(wildcard worker/hetero_worker/native/compute/*.[ch]) | $(STAMP)
	@$(BIN)/python -m hetero_worker.native.build || echo "going on without them: ranks on host cores will be slower"

native: $(STAMP) ## Build the exchange and the kernels in C again (`make install` does so too); needs a C compiler
	@$(BIN)/python -m hetero_worker.native.build

demo: $(STAMP) $(NATIVE) ## Serve SmolLM2 on two CPU ranks of this machine and let it answer a question
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	@$(BIN)/hetero run examples/smollm2-cpu.yaml --model smollm2-135m-instruct --temperature 0 "In three sentences, explain why the sky is blue."

# `make test` is what a person runs, with fewer examples of each property; `make test-all` adds the tests of
# tests/extended.toml and all examples. TIER= runs all of a suite.
TIER ?= -m 'not extended' --hypothesis-profile=quick
test: test-unit test-cluster test-distributed ## Run the tests that a person runs (15 minutes on two cores)

test-rest: ## Run the tests that `make test` leaves out
	@$(MAKE) --no-print-directory test TIER='-m "extended or hypothesis"'

test-all: test test-rest ## Run all tests, as continuous integration does

# One thread for each of torch's operations: their threads would wait for one another where two tests run at once.
test-unit: $(STAMP) $(NATIVE) ## Run the tests that start no processes
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit -n 2 -q $(TIER)

test-distributed: $(STAMP) $(NATIVE) ## Run the tests with real rank processes and the real model, one after another
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/pytest tests/distributed -q $(TIER)

test-sanitizers: $(STAMP) $(NATIVE) ## Run the exchange and the kernels in C under sanitizers (`make test-all` does, too)
	$(BIN)/pytest tests/unit/worker_rank/test_native_stress.py tests/unit/native_compute/test_sanitizers.py -q

FUZZ_MINUTES ?= 30
fuzz: $(STAMP) $(NATIVE) ## Fuzz every reader of files, requests and messages for FUZZ_MINUTES (30) each; FUZZ='gguf bodies': these
	$(BIN)/python -m tests.unit.fuzz --seconds $$(($(FUZZ_MINUTES) * 60)) $(FUZZ)

test-healing: $(STAMP) $(NATIVE) ## Kill and freeze ranks 50 times in a row under load (`make test` does so 5 times)
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	HETERO_HEALING_KILLS=50 $(BIN)/pytest tests/distributed/test_healing.py -q -s --timeout=0

# Variables: ONLY='kill leader' (pairs whose name has it), QUICK=1 (a dozen of them). Root plays full disks and cut networks, too, in namespaces of its own.
chaos: $(STAMP) $(NATIVE) ## Play some 380 faults at moments of real groups under real clients, in an hour or two; prints a row each
	$(BIN)/python -m tests.chaos $(if $(QUICK),--quick) $(if $(ONLY),--only '$(ONLY)')

SOAK_MINUTES ?= 60
soak: $(STAMP) $(NATIVE) ## Serve for SOAK_MINUTES (60) at 70 % load; fail if a process grows or a request is lost; writes bench/results
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.soak --minutes $(SOAK_MINUTES)

test-release: $(STAMP) ## Build a wheel of the commit, and serve from an environment that has nothing else, without a compiler
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	HETERO_TEST_RELEASE=1 $(BIN)/pytest tests/distributed/test_release_wheel.py -q -m ""

test-gpu: $(STAMP) $(NATIVE) ## Run the tests that need an NVIDIA GPU; without one they are skipped, and say so
	$(BIN)/pytest tests/gpu -q -rs

CUDA_VENV := .venv-cuda
test-cuda-wheel: $(STAMP) ## Test the process that forks ranks with a CUDA build of torch, without a driver (fetches gigabytes into .venv-cuda)
	@test -e $(CUDA_VENV)/.installed || { $(PYTHON) -m venv $(CUDA_VENV) \
	&& $(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt) \
	&& $(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker]' \
	&& touch $(CUDA_VENV)/.installed; }
	HETERO_CUDA_PYTHON=$(CUDA_VENV)/bin/python $(BIN)/pytest tests/cuda_wheel -q -rs

kubernetes: $(STAMP) ## Find or fetch a Kubernetes control plane, kubectl and Helm for the tests
	@$(BIN)/python -m tests.support.kube.provision

test-cluster: kubernetes ## Run the operator's tests against a real Kubernetes API server
	$(BIN)/pytest tests/cluster -n 4 -q $(TIER)

# With KUBECONFIG set, that cluster is used as it is: its nodes pull the images (tests/e2e/site.py has the variables).
RELEASED   := operator gateway router worker-cpu
E2E_IMAGES ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hetero/images
test-e2e: $(STAMP) ## Run chart, images and a model on real nodes: this machine's own (as root), or those of KUBECONFIG
	@$(BIN)/hetero model fetch smollm2-135m-instruct
ifeq ($(KUBECONFIG),)
	@$(BIN)/python -m tests.support.kube.provision --nodes
	SAVE="$(E2E_IMAGES)" IMAGES="$(RELEASED)" $(BIN)/python -m tools.images build
	IMAGES="$(RELEASED)" $(BIN)/python -m tools.images sizes
endif
	HETERO_E2E_IMAGES="$(E2E_IMAGES)" IMAGES="$(RELEASED)" $(BIN)/pytest tests/e2e -v

lint: $(STAMP) ## Check style, the architecture's import rules and the product's size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/measure_code.py

format: $(STAMP) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP) ## Check types, strictly
	$(BIN)/mypy operator/hetero_operator worker/hetero_gateway worker/hetero_worker worker/hetero_client worker/hetero_placement protos/hetero_api tools tests bench

protos: $(STAMP) ## Generate the protobuf and gRPC stubs
	$(BIN)/python -m tools.generate protos

manifests: $(STAMP) ## Generate the CRD from hetero_api/spec.py, and the reference page
	$(BIN)/python -m tools.generate manifests docs

docs: $(STAMP) ## Generate the pages and pictures of docs that are made from the code
	$(BIN)/python -m tools.generate docs picture models planning metrics reference concepts

site: $(STAMP) ## Build the documentation as a site in build/site; a broken link or anchor fails
	$(BIN)/python -m tools.site.build

chart: $(STAMP) ## Generate the Helm chart's schema and README from the comments in its values.yaml, and its dashboards
	$(BIN)/python -m tools.generate chart dashboards

golden: $(STAMP) ## Write the golden renders of tests/unit/operator anew; read the difference before a commit
	UPDATE_GOLDEN=1 $(BIN)/pytest tests/unit/operator/test_render_golden.py -q

verify: $(STAMP) ## Fail when generated files differ from their sources, or locks from pyproject.toml
	$(BIN)/python -m tools.generate --check protos manifests docs chart picture models planning metrics dashboards reference concepts
	$(BIN)/python -m tools.images locks --check

bench: $(STAMP) $(NATIVE) ## Measure against transformers and this machine's limits; writes bench/results
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.run

# Variables: ROUNDS=3, MODEL=smollm2-135m (or qwen3-0.6b, qwen3-1.7b), ONLY='hetero llama.cpp', WORKLOADS='decode1 batch32'.
ROUNDS ?= 3
MODEL  ?= smollm2-135m
bench-peers: $(STAMP) $(NATIVE) ## Measure against llama.cpp, OpenVINO, CTranslate2, vLLM and transformers, as far as installed; docs/benchmarks.md
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.run --peers --rounds $(ROUNDS) --model $(MODEL) $(if $(ONLY),--only $(ONLY)) $(if $(WORKLOADS),--workloads $(WORKLOADS))

bench-peers-install: $(STAMP) ## Make the peers' environments and convert MODEL for them (gigabytes; llama.cpp compiles for minutes)
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.peers.install --model $(MODEL)

bench-scaling: $(STAMP) $(NATIVE) ## Measure tokens/s over 1 to 64 sequences and contexts of 128 to 8,192 tokens; writes bench/results
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.scaling --rounds $(ROUNDS) --model $(MODEL) $(if $(ONLY),--only $(ONLY))

bench-perplexity: $(STAMP) $(NATIVE) ## Measure what weights of 8 and 4 bits lose on a shipped text; writes bench/results
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.perplexity --model $(MODEL) $(if $(ONLY),--only $(ONLY))

bench-engine: $(STAMP) $(NATIVE) ## Measure scheduler, gateway, overlap, prefix cache and micro-batches, each against its limit
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.scheduler_steps
	$(BIN)/python -m bench.gateway_alone
	$(BIN)/python -m bench.short_requests
	$(BIN)/python -m bench.engine_core
	$(BIN)/python -m bench.micro_batches

bench-exchange: native ## Measure an exchange of two ranks on two cores: native, in Python, over Gloo; writes bench/results
	$(BIN)/python -m bench.exchange

bench-exchange-hosts: native ## Measure an exchange of two network namespaces, natively over TCP and over Gloo; needs root; writes bench/results
	$(BIN)/python -m bench.exchange_hosts
	$(BIN)/python -m bench.exchange_hosts --delayed

bench-prediction: $(STAMP) $(NATIVE) ## Measure whether placements of three models are as fast as predicted; writes bench/results
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.prediction

bench-cuts: $(STAMP) $(NATIVE) ## Measure layers of the largest models' shapes beside llama.cpp on one GGUF file; writes bench/results
	$(BIN)/python -m bench.cuts

bench-gpu: $(STAMP) $(NATIVE) ## On a machine with an NVIDIA GPU: run tests/gpu and measure the GPU runner, in 18 minutes; writes bench/results
	PYTHON=$(BIN)/python sh bench/gpu/check.sh tests
	PYTHON=$(BIN)/python sh bench/gpu/check.sh bench

bench-recovery: $(STAMP) $(NATIVE) ## Measure how long a group takes to recover from 50 killed or frozen ranks; writes bench/results
	@$(BIN)/hetero model fetch smollm2-135m-instruct
	$(BIN)/python -m bench.recovery

bench-operator: kubernetes ## Measure the operator with 1,000 resources; writes bench/results
	$(BIN)/python -m bench.operator_scale

base-image: $(STAMP) ## Make a base image of Debian's packages, for where no image registry is in reach (as root)
	$(BIN)/python -m tools.images base

images: $(STAMP) ## Build the CPU images (IMAGES=worker-gpu: the GPU one) with docker, podman or buildah; docs/images.md has the variables
	$(BIN)/python -m tools.images build

# Variables: WHEELS=FOLDER (torch's wheel for CPUs, where its index is not in reach), TORCH_INDEX=URL (another CUDA), LOCKS=worker-gpu.
locks: $(STAMP) ## Make the hashed locks of the images again from pyproject.toml and constraints.txt, with uv
	$(BIN)/python -m tools.images locks $(LOCKS) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

audit: $(STAMP) ## Compare the images in SAVE=FOLDER with their locks and bills of materials, and ask for advisories
	$(BIN)/python -m tools.images audit

check-images: $(STAMP) ## Fail when a built image adds a tenth more to its base than was recorded
	$(BIN)/python -m tools.images sizes

record-images: $(STAMP) ## Record the sizes of the images that are built, in tools/images/sizes.json and docs/images.md
	$(BIN)/python -m tools.images sizes --record

# Variables: PUSH=HOST/PATH (without it nothing leaves this machine), KEY=FILE (and KEY_PASSPHRASE=FILE) to sign,
# ARCHITECTURES=x86_64 where there is no cross compiler, DIST=FOLDER, and those of `make images`.
DIST ?= dist
release: $(STAMP) ## Build wheels, chart, images, bills of materials and checksums into DIST; PUSH=HOST/PATH: push images and chart there
	$(BIN)/python -m tools.release build "$(DIST)" $(if $(ARCHITECTURES),--architectures $(ARCHITECTURES))
ifneq ($(PUSH),)
	$(BIN)/python -m tools.release push "$(DIST)" "$(PUSH)" $(if $(KEY),--key "$(KEY)") $(if $(KEY_PASSPHRASE),--passphrase-file "$(KEY_PASSPHRASE)")
endif

clean: ## Remove .venv and caches
	rm -rf $(VENV) $(CUDA_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
