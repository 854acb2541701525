# Two commands matter: `make demo` and `make test`. Every target makes the environment it needs (tools/environments.py);
# SERVER_PYTHON, EVALS_PYTHON and FRAMEWORKS_PYTHON in the environment name an interpreter to use instead.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-quick check format lint types bench soak overhead evals drift kernels-check bench-gpu clean

SERVER = PYTHON="$${SERVER_PYTHON:-$$(python3 tools/environments.py server)}" &&
EVALS = EVALS_PYTHON="$${EVALS_PYTHON:-$$(python3 tools/environments.py evals)}" &&
# Without Python 3.12 the tests that need it are skipped, and say so; a failing set-up stays a failure.
if_possible = $(2)="$${$(2):-$$(python3 tools/environments.py $(1) || [ $$? -eq 3 ])}" && export $(2) &&

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## An agent fixes a bug on the embedded server, in three arms; table, plot and out/demo.json
	@$(SERVER) $$PYTHON examples/demo/run.py

test: check ## Format, lint, types, then all tests (servers on the CPU included)
	@$(SERVER) $(call if_possible,evals,EVALS_PYTHON) $(call if_possible,frameworks,FRAMEWORKS_PYTHON) \
	$$PYTHON -m pytest $(ARGS)

test-quick: check ## The same without tests that start a server or are slow
	@$(SERVER) $$PYTHON -m pytest -m "not server and not slow" $(ARGS)

check: lint types ## Format, lint and types, changing nothing

lint: ## ruff, changing nothing
	@$(SERVER) $$PYTHON -m ruff format --check . && $$PYTHON -m ruff check .

types: ## mypy
	@$(SERVER) $$PYTHON -m mypy

format: ## Format and sort imports in place
	@$(SERVER) $$PYTHON -m ruff check --fix --select I . && $$PYTHON -m ruff format .

bench: ## Time to first token of append, splice and re-prefill: out/bench_ttft.json
	@$(SERVER) $$PYTHON -m leyline_evals.bench $(ARGS)

soak: ## Random edits for a long time, watching pool totals and memory
	@$(SERVER) $$PYTHON -m leyline_evals.soak $(ARGS)

overhead: ## What the extension costs requests that do not use it
	@$(SERVER) $$PYTHON -m leyline_evals.overhead $(ARGS)

# Token counts follow from tokens, not from weights: a tiny model with a real tokenizer has room for whole trajectories.
evals: ## Recorded agent trajectories replayed in all arms: out/evals.json
	@$(SERVER) $$PYTHON -m leyline_evals.cli replay --model tiny-chat --context-length 32768 \
	--max-total-tokens 131072 $(ARGS)

drift: ## How chained rotations drift, against rotate-once
	@$(SERVER) $$PYTHON -m leyline_evals.drift $(ARGS)

kernels-check: ## Compile every kernel for sm_80 and sm_90 without a GPU, refusing spills
	@$(SERVER) $$PYTHON tools/kernels_check.py $(ARGS)

bench-gpu: ## Kernel timings against the copy bandwidth; needs a CUDA device
	@$(SERVER) $$PYTHON -m leyline_evals.bench_gpu $(ARGS)

clean: ## Remove environments, caches and outputs of this checkout
	rm -rf .venvs out dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
