# A fresh machine needs python3 (3.11 or newer) and make. `make` alone lists what there is.
PYTHON ?= python3
VENV = .venv
READY = $(VENV)/.ready
ARGS ?=

PYTEST = -m pytest -n 2 --dist=worksteal

.DEFAULT_GOAL := help
.PHONY: help train test test-rest test-heavy test-jax0.12 smoke-jax0.11 test-all lint lock clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z][^ ]*:.*  ## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

train: $(READY)  ## train configs/quickstart.py; more settings in ARGS="--config.train.steps=20"
	$(VENV)/bin/python -m jaxlc.train --config=configs/quickstart.py $(ARGS)

test: $(READY) $(VENV)/.ready-plan  ## the tests, on one JAX version
	$(VENV)/bin/python $(PYTEST) -m "not heavy" $(ARGS)

test-all: test test-rest  ## also heavy tests and the other JAX versions

test-rest: test-heavy test-jax0.12 smoke-jax0.11  ## what test-all adds to test

test-heavy: $(READY) $(VENV)/.ready-plan  ## large compile checks: the program for GPUs that are not here
	$(VENV)/bin/python $(PYTEST) -m heavy

test-jax0.12:  ## the tests on JAX 0.12, where a Python 3.12 or newer is
	$(call WITH_PYTHON_312,.venv-jax0.12,$(PYTEST) -m "not heavy",-plan)

smoke-jax0.11:  ## a few steps on JAX 0.11.2, which GPU machines often carry; needs Python 3.12 or newer too
	@rm -rf .cache/smoke
	$(call WITH_PYTHON_312,.venv-jax0.11,-m jaxlc.train --config=configs/quickstart.py --workdir=.cache/smoke \
	  --config.train.steps=3 --config.data.seq_len=512)

lint: $(READY)  ## ruff
	$(VENV)/bin/python -m ruff check .

lock: $(READY)  ## choose the pinned versions anew, with uv
	$(VENV)/bin/python -m pip install --quiet uv
	printf '%s\n' 'jax==0.10.1; python_version < "3.12"' 'jax==0.12.0.1; python_version >= "3.12"' > $(VENV)/jax.txt
	$(UV_COMPILE) --extra dev --upgrade --output-file requirements.lock
	$(UV_COMPILE) --extra plan --no-deps | grep '^jax-cuda' > requirements-plan.lock

clean:  ## remove environments, caches and runs' leftovers, but not runs/
	rm -rf .venv .venv-jax0.11 .venv-jax0.12 .cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

UV_COMPILE = $(VENV)/bin/uv pip compile pyproject.toml --quiet --constraint $(VENV)/jax.txt --universal \
  --python-version 3.11 --no-annotate --no-header --no-emit-index-url

# The first that runs and is new enough: a pyenv shim may be there and not run.
FIND_PYTHON_312 = for python in python3.12 python3.13 $$HOME/.pyenv/versions/3.1[23]*/bin/python $(PYTHON); do \
  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && { echo "$$python"; break; }; done

# $(1) environment, $(2) what its Python runs, $(3) "-plan" if that needs the GPU compiler
define WITH_PYTHON_312
@python=$$($(FIND_PYTHON_312)); \
	if [ -z "$$python" ]; then echo "no Python 3.12 or newer here: $@ is left out"; \
	else $(MAKE) --no-print-directory $(1)/.ready$(3) PYTHON="$$python" && $(1)/bin/python $(2); fi
endef

# jaxlc is installed editable, with the setuptools of the lock: --no-build-isolation downloads nothing more.
define INSTALL
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and jaxlc needs 3.11 or newer: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv --clear $(@D) || { echo "no venv module: install your system's python3-venv package"; exit 1; }
	$(@D)/bin/python -m pip install --quiet --requirement $(1)
	$(@D)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
endef

$(READY) .venv-jax0.12/.ready: requirements.lock pyproject.toml
	$(call INSTALL,requirements.lock)

# The GPU compiler, without a GPU and without NVIDIA's libraries.
%/.ready-plan: %/.ready requirements-plan.lock
	$*/bin/python -m pip install --quiet --no-deps --requirement requirements-plan.lock
	@touch $@

.venv-jax0.11/.ready: requirements.lock pyproject.toml
	@mkdir -p .cache
	sed -n '/^jax\(lib\)\{0,1\}==/!p' requirements.lock > .cache/requirements-jax0.11.txt
	printf 'jax==0.11.2\njaxlib==0.11.2\n' >> .cache/requirements-jax0.11.txt
	$(call INSTALL,.cache/requirements-jax0.11.txt)
