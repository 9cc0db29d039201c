# SPDX-License-Identifier: Apache-2.0
# make setup, demo, test, test-all, compare-latency, pictures, gpu-bundle, lint, format, clean.
# Another Python: make setup PYTHON=python3.12
# A lesser processor than this one: make demo PROCESSOR=avx2 (or avx512, avx512_bf16), and so any target.
# make test SUITE=upstream SOURCE=path: vLLM's source distribution; without it pip downloads it.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SUITE ?= product
PROCESSORS := avx2 avx512 avx512_bf16
export SOURCE
CODE := vllm_overlay tools devtools tests bench hatch_build.py

.PHONY: setup demo test test-all compare-latency pictures gpu-bundle lint format clean
.DEFAULT_GOAL := setup

# tests/processor/sitecustomize.py says how this reaches every Python process.
ifdef PROCESSOR
ifeq ($(filter $(PROCESSOR),$(PROCESSORS)),)
$(error PROCESSOR=$(PROCESSOR): known are $(PROCESSORS))
endif
export TEST_PROCESSOR := $(PROCESSOR)
export PYTHONPATH := $(CURDIR)/tests/processor$(if $(PYTHONPATH),:$(PYTHONPATH))
endif

setup:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not there: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) tools/setup_cpu.py --venv $(VENV) --dev

demo: setup
	@$(BIN)/python tools/demo.py

# The product's promises and all that is quick: a quarter of an hour. SUITE=name runs another suite; CONTRIBUTING.md lists them.
# TESTS="tests/planner -k name" runs these alone, of whatever suite. ONLY=processor runs those of the suite with that marker.
test: setup
ifdef TESTS
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)
else
	$(BIN)/python -m devtools.suites $(SUITE) $(if $(ONLY),--only $(ONLY))
endif

# Every suite: about an hour.
test-all: setup
	$(BIN)/python -m devtools.suites all

# Times to the first token without a connector, in scheduler steps, without the series and with it: about half an hour.
compare-latency: setup
	$(BIN)/python -m bench.prefill_steps

# Pictures of the dashboards from a real run: about three minutes.
pictures: setup
	$(BIN)/python -m tests.dashboards.pictures

# One archive for a machine with a GPU and no package index: docs/gpu.md. Downloads 400 MB; about three minutes.
gpu-bundle:
	$(PYTHON) tools/gpu_bundle.py

lint: setup
	$(BIN)/ruff format --check $(wildcard $(CODE))
	$(BIN)/ruff check $(wildcard $(CODE))
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format $(wildcard $(CODE))
	$(BIN)/ruff check --fix $(wildcard $(CODE))

clean:
	rm -rf build dist .gpu-bundle .demo .upstream .benchmarks .faults .suites .flakes .prometheus .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
