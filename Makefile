# On a bare machine: Python 3.10 to 3.14, git, make and the package registries.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= $(shell python3.11 -c '' 2> /dev/null && echo python3.11 || echo python3)
BIN := .venv/bin
STAMP := .venv/.complete

# vLLM and speculators, on each of which the real tests run.
PAIRS := 0.11.0/0.3.0 0.11.0/0.4.0.1 0.16.0/0.3.0 0.16.0/0.4.0.1 0.32.0/0.3.0 0.32.0/0.4.0.1
# More vLLMs for the server path; their speculators is not used, the clients are other releases.
SERVERS := 0.19.1/0.4.0.1 0.22.1/0.4.0.1 0.26.0/0.4.0.1

.PHONY: help venv demo test lint unit environments real families docs docs-check surfaces matrix server-evidence
.PHONY: release-check bench bench-refusals bench-gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

venv: $(STAMP)  ## make .venv with this package and the tools for working on it

$(STAMP): pyproject.toml
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --retries 10 --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## extract with stock speculators where it dies by itself, and compare every tensor
	@$(BIN)/python tools/demo.py

test: lint unit docs environments real  ## everything that CI runs

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(STAMP)  ## tests that need no vLLM
	$(BIN)/pytest tests/unit

environments: $(STAMP)  ## make the environments with a real vLLM; the first time that takes some minutes each
	@for pair in $(PAIRS) $(SERVERS); do \
	    SECONDS=0; echo "vLLM $${pair%/*}, speculators $${pair#*/}: making the environment"; \
	    $(BIN)/python tools/environments.py $${pair%/*} $${pair#*/} > /dev/null; \
	    echo "vLLM $${pair%/*}, speculators $${pair#*/}: ready after $$SECONDS s"; \
	done

real: environments  ## real vLLM releases: the contract suite, and extraction compared with transformers
	$(BIN)/pytest tests/real -n 2 --dist loadgroup

families: $(STAMP)  ## every model family that this machine can run, each layer compared with a reference
	$(BIN)/python tools/families.py
	$(BIN)/python tools/families.py qwen2_5_vl qwen3_vl qwen3_5 --pair 0.26.0 0.4.0.1
	$(BIN)/python tools/family_docs.py

docs-check: $(STAMP)  ## the generated pages are what they are made from
	$(BIN)/python tools/adapter_docs.py --check
	$(BIN)/python tools/release_docs.py --check
	$(BIN)/python tools/family_docs.py --check
	$(BIN)/python tools/gpu_docs.py --check
	$(BIN)/python tools/server_docs.py --check
	$(BIN)/eagle3compat matrix check
	$(BIN)/python tools/matrix_docs.py --check
	$(BIN)/python tools/performance_chart.py --check
	$(BIN)/python benchmarks/refusals.py --page --check

surfaces: $(STAMP)  ## make tests/surfaces anew from the package index, after a vLLM release or a change of clauses
	$(BIN)/python tools/surface_record.py
	$(BIN)/python tools/release_docs.py

matrix: $(STAMP)  ## measure every pair that has no evidence yet, in an environment each: hours, and it goes on where it stopped
	$(BIN)/python tools/matrix.py
	$(BIN)/python tools/matrix_docs.py

server-evidence: environments  ## measure the server path anew on its vLLMs, and write the table
	SERVER_EVIDENCE=$(CURDIR)/evidence/server $(BIN)/pytest tests/real/test_stock_server.py tests/real/test_serve.py -n 2 --dist loadgroup
	$(BIN)/python tools/server_docs.py

docs: docs-check  ## build the documentation into out/site; a broken link or a page outside the menu fails
	$(BIN)/mkdocs build --quiet

release-check: $(STAMP)  ## build, metadata, the wheel in a bare environment, doctor, a consumer's mypy
	@$(BIN)/python tools/release_check.py

bench: $(STAMP)  ## what import, apply and capture cost; raw figures go to out/
	@$(BIN)/python benchmarks/import_and_apply.py
	@$(BIN)/python benchmarks/hooks.py --rounds 5
	@$(BIN)/python benchmarks/extraction.py --rounds 5
	@$(BIN)/python benchmarks/growth.py --rounds 3
	@$(BIN)/python benchmarks/against.py --rounds 3

bench-refusals: $(STAMP)  ## how soon a run that cannot work is refused, kind by kind, and the table of that in the docs
	@$(BIN)/python benchmarks/refusals.py

bench-gpu:  ## speed on this machine's accelerator, without a network: PYTHON=one that has vLLM and speculators
	@$(PYTHON) benchmarks/extraction.py --here --shape qwen3-8b --connector
	@$(PYTHON) benchmarks/growth.py --here --shape qwen3-8b

clean:  ## delete .venv and what was made here; environments with vLLM are kept
	rm -rf .venv out .nox .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
