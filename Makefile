# Everything runs in .venv, which the first target that needs it makes: with what octavo itself
# needs (`make run`), or with the tools for its development besides (`make test` and the like).
#
# `pip install torch` takes the build for NVIDIA GPUs, several gigabytes, where the package index
# offers that one. For a CPU, let pip find a CPU build of the pinned version first: set
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, which pip reads by itself.

# Where modules are compiled again by each process that imports them, servers start a second later.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
RUNTIME := .venv/installed
DEV := .venv/installed-dev
SOURCES := $(wildcard src paper demo tests benchmarks examples tools)
PROMPTS ?= "Once upon a time" "One morning, a little girl" \
    "The dog sees the house. =>"
# 1,024 KV blocks are enough for the embedded model, and can all be seen on a page.
SERVE ?= demo --num-blocks 1024

.PHONY: run generate test test-gpu test-clients soak browser check types lint imports size nightly \
    mutants bench clean reproduce test-torch

run: $(RUNTIME)  ## serve the embedded model, with its picture, at http://127.0.0.1:8000
	$(BIN)/octavo serve $(SERVE)

generate: $(RUNTIME)  ## generate text with the embedded model
	$(BIN)/octavo generate --max-tokens 80 --temperature 0.7 $(PROMPTS)

test: $(DEV) browser  ## all tests but the slow ones
	$(BIN)/pytest -n auto --dist worksteal -m "not slow" --timeout 900  # one that hangs is named

browser:  ## chromium for the tests of the pages, where it can be had
	@command -v chromium > /dev/null || command -v google-chrome > /dev/null || { \
	    test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get -qq update && \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
	        chromium fonts-dejavu-core > /dev/null; \
	} || echo "There is no chromium, and it cannot be installed: tests of the pages will be skipped."

nightly: $(DEV)  ## the slow tests, and then all others on two versions of torch
	$(BIN)/pytest -n auto --dist worksteal -m slow
	$(BIN)/python tools/torch_versions.py

test-torch: $(DEV)  ## all tests but the slow ones, on the oldest and on the newest torch
	$(BIN)/python tools/torch_versions.py

soak: $(DEV)  ## an hour of kills, malformed requests and random work; SOAK="--scale 0.05" is shorter
	PYTHONPATH=tests $(BIN)/python -m soak $(SOAK)

test-gpu: $(DEV)  ## what needs an NVIDIA GPU
	$(BIN)/pytest -n 4 -m gpu

test-clients: $(DEV)  ## other people's clients against a server, each in its own environment
	$(BIN)/python tests/clients/run.py

reproduce: $(DEV)  ## the paper's figures, into reproduction/; FIGURES="fig12 fig13" draws some
	$(BIN)/octavo reproduce $(FIGURES)

mutants: $(DEV)  ## whether the core's tests notice what is wrong: a sample of small changes to it
	$(BIN)/python tools/mutants.py

check: types lint imports  ## format, lint, types, who may import whom

types: $(DEV)
	$(BIN)/mypy

lint: $(DEV)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

imports: $(DEV)
	$(BIN)/lint-imports --no-logo

size: $(RUNTIME)  ## lines of each package
	$(BIN)/python tools/size.py

bench: $(DEV)  ## core overhead, memory waste, CPU throughput
	$(BIN)/python benchmarks/core_overhead.py
	$(BIN)/python benchmarks/rank_messages.py
	$(BIN)/octavo bench throughput --model benchmarks/configs/tiny --load-format dummy \
	    --trace benchmarks/traces/bench_sharegpt_1000.csv --num-blocks 983 \
	    --max-num-batched-tokens 2560
	$(BIN)/python benchmarks/cpu_throughput.py

$(BIN)/python:
	$(PYTHON) -m venv .venv

$(RUNTIME): pyproject.toml | $(BIN)/python
	@$(BIN)/python tools/install.py
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python  # brings what octavo itself needs along
	@$(BIN)/python tools/install.py dev
	@touch $(RUNTIME) $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find src paper demo tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
