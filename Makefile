# SPDX-License-Identifier: Apache-2.0
# make setup, demo, test, test-avx2, test-compiled, test-crash, test-faults, test-adapters, test-matrix, test-upstream, test-poison, compare-latency, dashboards, pictures, gpu-bundle, lint, format, clean.
# Another Python: make setup PYTHON=python3.12
# A lesser processor than this one: make demo PROCESSOR=avx2 (or avx512, avx512_bf16), and so any target.
# make test-upstream SOURCE=path: vLLM's source distribution; without it pip downloads it.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROCESSORS := avx2 avx512 avx512_bf16
CODE := vllm_overlay tools devtools tests bench hatch_build.py

.PHONY: setup demo test test-avx2 test-compiled test-crash test-faults test-adapters test-matrix test-upstream test-poison compare-latency dashboards pictures gpu-bundle lint format clean
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

# Two at a time: an engine keeps one core busy. A file's tests stay together, because they share engines; the long files are first.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(TESTS)

# The demo and the tests marked `processor`: where what vLLM chooses by the processor shows.
test-avx2:
	$(MAKE) test PROCESSOR=avx2 TESTS="-m processor"

# Engines that compile their model, for about a minute each.
test-compiled:
	$(MAKE) test TESTS="-m compiled"

test-crash: setup
	$(BIN)/python -m tests.tiers.disk.crash --kills 500 --seed 1
	$(BIN)/python -m tests.tiers.disk.fuzz --mutations 10000 --seed 1
	$(BIN)/python -m tests.tiers.disk.catalogue.crash --kills 500 --seed 1
	$(BIN)/python -m tests.tiers.disk.catalogue.fuzz --mutations 5000 --seed 1

test-upstream: setup
	$(BIN)/python devtools/upstream_tests.py $(if $(SOURCE),--source $(SOURCE))
	VLLM_SOURCE=$(CURDIR)/.upstream $(BIN)/python -m pytest tests/multi_connector/test_upstream.py

# Random schedules with failing loads on vLLM's real scheduler, 1,000 seeds of each of 24 kinds: about five minutes.
test-poison: setup
	$(BIN)/python -m devtools.poison_fuzz --seeds 1000 --jobs 2

# Times to the first token without a connector, in scheduler steps, without the series and with it: about half an hour.
compare-latency: setup
	$(BIN)/python -m bench.prefill_steps

# Every hook x kind of fault x side, then 1,000 random requests, in one real engine each: about a quarter of an hour.
# Then random children on the real scheduler without a model, 300 seeds a mode.
test-faults: setup
	$(BIN)/python -m tools.tiny_model .faults/tiny
	VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/python -m tests.multi_connector.matrix .faults/tiny
	VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/python -m tests.multi_connector.churn .faults/tiny --requests 1000
	$(BIN)/python -m tests.multi_connector.report_fuzz --seeds 300

# Every model of docs/models.md in real engines, and its table anew: about twenty minutes.
test-matrix: setup
	VLLM_CPU_KVCACHE_SPACE=1 $(BIN)/python -m tests.matrix

# An adapter whose weights change at random under its name and path, in a real engine: about three minutes.
test-adapters: setup
	$(BIN)/python -m tools.tiny_model .faults/tiny
	$(BIN)/python -m tests.engine.adapter_churn .faults/tiny --steps 80

# The dashboards' JSON from devtools/dashboards; a test says if it is stale.
dashboards: setup
	$(BIN)/python -m devtools.dashboards

# Pictures of them from a real run: about three minutes.
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
	rm -rf build dist .gpu-bundle .demo .upstream .benchmarks .faults .prometheus .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
