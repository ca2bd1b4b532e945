# Everything runs in .venv, which the first target that needs it makes.
#
# `pip install torch` takes the build for NVIDIA GPUs, several gigabytes, where the package index
# offers that one. For a CPU, let pip find a CPU build of the pinned version first: set
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, which pip reads by itself.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
SOURCES := $(wildcard src tests benchmarks examples tools)
PROMPTS ?= "Once upon a time" "One morning, a little girl" \
    "The dog sees the house. =>"
# 1,024 KV blocks are enough for the embedded model, and can all be seen on a page.
SERVE ?= demo --num-blocks 1024

.PHONY: run generate test test-gpu test-clients browser check size nightly mutants bench clean

run: $(STAMP)  ## serve the embedded model, with its picture, at http://127.0.0.1:8000
	$(BIN)/octavo serve $(SERVE)

generate: $(STAMP)  ## generate text with the embedded model
	$(BIN)/octavo generate --max-tokens 80 --temperature 0.7 $(PROMPTS)

test: $(STAMP) browser  ## all tests but the slow ones
	$(BIN)/pytest -n auto -m "not slow"

browser:  ## chromium for the tests of the pages, where it can be had
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || { \
	    test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get -qq update && \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
	        chromium fonts-dejavu-core > /dev/null; \
	} || echo "There is no chromium, and it cannot be installed: tests of the pages will be skipped."

nightly: $(STAMP)  ## the slow tests
	$(BIN)/pytest -n auto -m slow

test-gpu: $(STAMP)  ## what needs an NVIDIA GPU
	$(BIN)/pytest -n 4 -m gpu

test-clients: $(STAMP)  ## other people's clients against a server, each in its own environment
	$(BIN)/python tests/clients/run.py

mutants: $(STAMP)  ## whether the core's tests notice what is wrong: a sample of small changes to it
	$(BIN)/python tools/mutants.py

check: $(STAMP)  ## format, lint, types, who may import whom
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/pytest tests/test_imports.py

size: $(STAMP)  ## lines of each package
	$(BIN)/python tools/size.py

bench: $(STAMP)  ## core overhead, memory waste, CPU throughput
	$(BIN)/python benchmarks/core_overhead.py
	$(BIN)/octavo bench throughput --model benchmarks/configs/tiny --load-format dummy \
	    --trace benchmarks/traces/bench_sharegpt_1000.csv --num-blocks 983 \
	    --max-num-batched-tokens 2560
	$(BIN)/python benchmarks/cpu_throughput.py

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
