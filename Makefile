# libgdn: everything from a fresh Debian machine. Needs root or sudo, python3 >= 3.10 with pip, and nothing else: the
# rest is installed when missing (tools/apt_packages.txt, tools/requirements.txt into .venv). See `make help`.
SHELL  := /bin/bash
PYTHON ?= python3
JOBS   ?= $(shell nproc)
PREFIX ?= /usr/local
# CUDA backend: ON (installs nvcc from wheels into build/cuda-toolkit where there is none), OFF, AUTO (if there is an nvcc).
# GPU architectures, e.g. "90a" or "native"; empty: all that the library supports.
GPU    := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
CUDA   ?= $(if $(GPU),ON,OFF)
CUDA_ARCHITECTURES ?= $(if $(GPU),native)
# A Python with a CUDA build of torch (that of .venv is for CPUs).
GPU_PYTHON ?= python3
VENV   := .venv
STAMP  := build/stamp
QUIET  := PYTHON=$(PYTHON) tools/quiet.sh
PY     := $(VENV)/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

CUDA_DEFINES := GDN_CUDA=$(CUDA) $(if $(CUDA_ARCHITECTURES),GDN_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES))
CUDA_OPTIONS := $(foreach define,$(CUDA_DEFINES),"-D$(define)")
ifeq ($(CUDA),ON)
WITH_NVCC := CUDACXX="$$(PYTHON=$(PYTHON) tools/cuda_toolkit.sh)" && export CUDACXX &&
endif

LIBRARY_SOURCES := $(shell find include src cmake python -type f -not -name '*.pyc') CMakeLists.txt pyproject.toml

.PHONY: help setup build test test-gpu demo bench bench-peers bench-gpu format lint install clean FORCE
.DEFAULT_GOAL := help

help:
	@echo "make demo [MODEL=<folder> TEXT=<file>]  run a Qwen3.5-architecture model with and without libgdn"
	@echo "make test                               all C++ and Python tests"
	@echo "make test-gpu                           the CUDA tests on this machine's GPU; records tests/reports/cuda.json"
	@echo "make bench                              every operator beside this machine's own limits"
	@echo "make bench-peers                        prefill and decode beside ggml and Transformers (bench/results)"
	@echo "make bench-gpu                          chunk_forward beside the installed GPU peers (bench/results)"
	@echo "make setup | build                      only the environment | also the library and the Python package"
	@echo "make format | lint                      format the sources | check format and style"
	@echo "make install [PREFIX=/usr/local]        install headers, library, CMake and pkg-config files"
	@echo "make clean                              remove build/ (and leave .venv)"
	@echo "Variables: PYTHON (python3 >= 3.10), JOBS (processes of the build), CUDA (ON, OFF, AUTO),"
	@echo "           CUDA_ARCHITECTURES (e.g. 90a or native; empty: all), GPU_PYTHON (one with a CUDA build of torch)"
	@echo "           With a GPU in this machine: ON and native, else OFF"

# ---- environment
$(STAMP)/apt-%: tools/apt_packages.txt tools/apt_install.sh
	@mkdir -p $(STAMP)
	@echo "== Debian packages needed to $*"
	@PYTHON=$(PYTHON) tools/apt_install.sh $*
	@touch $@

$(STAMP)/venv: tools/requirements.txt | $(STAMP)/apt-build
	@echo "== Python environment $(VENV) (torch, transformers, ...: some minutes the first time)"
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and "found Python " + v + ", expected 3.10 or later: make PYTHON=<one>")'
	@[ -x $(PY) ] || $(PYTHON) -m venv $(VENV)
	@$(QUIET) pip $(PY) -m pip install --no-compile -r tools/requirements.txt
	@touch $@

setup: $(STAMP)/venv

# ---- library and Python package
# Its content is the options, so that changing them builds anew.
$(STAMP)/cuda-options: FORCE
	@mkdir -p $(STAMP)
	@echo '$(CUDA_OPTIONS)' | cmp -s - $@ || echo '$(CUDA_OPTIONS)' >$@

$(STAMP)/package: $(STAMP)/venv $(STAMP)/cuda-options $(LIBRARY_SOURCES)
	@echo "== Library and Python package (build/python)"
	@$(WITH_NVCC) $(QUIET) package $(PY) -m pip install --no-build-isolation --no-deps --force-reinstall \
	  -C build-dir=build/python $(foreach define,$(CUDA_DEFINES),-C "cmake.define.$(define)") .
	@touch $@

build: $(STAMP)/package

# ---- tests
$(STAMP)/test-configured: CMakeLists.txt $(STAMP)/cuda-options | $(STAMP)/apt-build $(STAMP)/apt-test
	@$(WITH_NVCC) $(QUIET) configure-test cmake -S . -B build/test -G Ninja -DGDN_BUILD_TESTS=ON -DGDN_WERROR=ON \
	  $(CUDA_OPTIONS)
	@touch $@

test: $(STAMP)/package $(STAMP)/test-configured
	@echo "== C++ tests: build (build/test)"
	@$(QUIET) build-test cmake --build build/test -j $(JOBS)
	@mkdir -p build/report && rm -f build/report/cpp.xml build/report/python.xml
	@echo "== C++ tests: run"
	@ctest --test-dir build/test -j $(JOBS) --output-on-failure --no-tests=error \
	  --output-junit $(CURDIR)/build/report/cpp.xml >build/log/ctest.log 2>&1 </dev/null; cpp=$$?; \
	  [ $$cpp -eq 0 ] && tail -n 3 build/log/ctest.log || grep -vE '^ *[0-9]+/[0-9]+ Test .* Passed|^ *Start ' build/log/ctest.log | tail -n 120; \
	echo "== Python tests"; \
	$(PY) -m pytest tests/python --junitxml=build/report/python.xml </dev/null; python=$$?; \
	$(PY) tools/summarize_tests.py --exit ctest=$$cpp --exit pytest=$$python build/report/cpp.xml build/report/python.xml

test-gpu: $(STAMP)/venv | $(STAMP)/apt-build $(STAMP)/apt-test
	@GPU_PYTHON=$(GPU_PYTHON) JOBS=$(JOBS) tools/test_gpu.sh

# ---- demo and benchmarks
demo: $(STAMP)/package
	@$(PY) demo/run.py $(if $(MODEL),--model "$(MODEL)") $(if $(TEXT),--text "$(TEXT)")

bench: $(STAMP)/package
	@$(VENV)/bin/gdn bench

bench-peers: $(STAMP)/package
	@$(PY) bench/cpu_peers.py

bench-gpu:
	@GDN_LIBRARY=$${GDN_LIBRARY:-build/gpu/libgdn.so} $(GPU_PYTHON) bench/gpu_peers.py

# ---- style
CPP_FILES := $(shell git ls-files '*.h' '*.hpp' '*.cpp' '*.c' '*.cu' '*.cuh' 2>/dev/null)

format: $(STAMP)/venv | $(STAMP)/apt-ci
	@clang-format -i $(CPP_FILES)
	@$(VENV)/bin/ruff check --fix . && $(VENV)/bin/ruff format .

lint: $(STAMP)/venv | $(STAMP)/apt-ci
	clang-format --dry-run -Werror $(CPP_FILES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

install: | $(STAMP)/apt-build
	@echo "== Installing to $(PREFIX)"
	@$(WITH_NVCC) $(QUIET) configure-install cmake -S . -B build/install -G Ninja $(CUDA_OPTIONS)
	@$(QUIET) build-install cmake --build build/install -j $(JOBS)
	@cmake --install build/install --prefix "$(PREFIX)"

clean:
	rm -rf build
