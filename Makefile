# The only list of commands. `make demo` and `make test` set everything up first.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROLES := operator agent engine cli cluster build dev
# A machine's own uv is used when it has one; otherwise the package index gives us a private copy.
UV := $(shell command -v uv || echo .uv/bin/uv)
LOCK := $(UV) pip compile pyproject.toml --universal --generate-hashes --no-emit-index-url --no-annotate --no-header --quiet

.PHONY: help demo test check api soak gpu kind kind-down images fmt generate lock bench clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

.uv/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv .uv || { echo "error: python3 -m venv does not work here — install the package python3-venv"; exit 1; }
	@.uv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt

$(VENV)/installed: $(UV) pyproject.toml requirements/dev.txt
	@echo "Setting up $(VENV) (PyTorch is a large download the first time)"
	@test -x $(BIN)/python || $(UV) venv --quiet --no-config --python $(PYTHON) $(VENV)
	@# Bytecode is compiled once here: every rank of every engine start would compile it again.
	@$(UV) pip sync --quiet --compile-bytecode --python $(BIN)/python --require-hashes requirements/dev.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(VENV)/installed ## draw two digits with the sample model, streamed from the host weight cache
	$(BIN)/dlo run -f examples/digits.yaml --prompt "a handwritten seven" --prompt "a handwritten three" --out out/

test: check ## every check and test that this machine can run; DLO_CLUSTER=1 adds those on a kind cluster
	@# The API server's binaries come from Go modules, once: about 15 minutes where nothing is cached.
	$(BIN)/python tests/clusterbin.py --if-possible
	OMP_NUM_THREADS=1 $(BIN)/pytest

check: $(VENV)/installed ## lint, types, import walls, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m dlo_api.crdgen --check crds
	$(BIN)/python -m dlo_api.crdgen --check charts/dlo-operator/files/crds

api: $(VENV)/installed ## the tests against a real API server; without Go or its binaries they fail here
	$(BIN)/python tests/clusterbin.py
	DLO_REQUIRE_API=1 $(BIN)/pytest tests/api

soak: $(VENV)/installed ## the long forms of fault tests: a kill after every write, every fault on every call; about an hour
	$(BIN)/python tests/clusterbin.py
	DLO_SOAK=1 DLO_REQUIRE_API=1 $(BIN)/pytest tests/api --timeout=5400

gpu: $(VENV)/installed ## the tests that need a CUDA device; without one they fail here
	DLO_REQUIRE_GPU=1 $(BIN)/pytest tests/gpu

kind: $(VENV)/installed ## a kind cluster on this machine with the product installed; make kind-down removes it
	PYTHONPATH=tests $(BIN)/python -m cluster up

kind-down: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m cluster down

images: $(VENV)/installed ## build the three images with docker or buildah
	PYTHONPATH=tests $(BIN)/python -m cluster images

fmt: $(VENV)/installed ## format and fix what can be fixed by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/installed ## write the generated files again: CRDs, reference pages
	$(BIN)/python -m dlo_api.crdgen crds
	$(BIN)/python -m dlo_api.crdgen charts/dlo-operator/files/crds
	$(BIN)/python -m dlo_api.crdgen --reference > docs/reference/api.md
	$(BIN)/python docs/reference/make_errors.py > docs/reference/errors.md
	$(BIN)/python charts/make_dashboards.py

lock: $(UV) ## resolve the newest versions and lock them with hashes
	$(LOCK) --upgrade --extra dev -o requirements/dev.txt
	for role in $(filter-out dev,$(ROLES)); do $(LOCK) --extra $$role -c requirements/dev.txt -o requirements/$$role.txt; done

bench: $(VENV)/installed ## measure this machine, write benchmarks/results
	$(BIN)/python benchmarks/cpu.py

clean: ## remove the environments and caches that these commands made
	rm -rf $(VENV) .uv .mypy_cache .ruff_cache .pytest_cache .hypothesis out
