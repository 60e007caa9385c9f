#!/bin/sh
# Installs what make test-image builds and runs images with, from Debian, or says in one line what is missing.
set -eu
missing=
for tool in buildah podman runc debootstrap npm; do command -v $tool >/dev/null 2>&1 || missing="$missing $tool"; done
test -z "$missing" && exit 0
if test "$(id -u)" = 0 && command -v apt-get >/dev/null 2>&1; then
    echo "installing$missing"
    export DEBIAN_FRONTEND=noninteractive
    options="-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=300"
    apt-get $options update </dev/null >/dev/null
    # shellcheck disable=SC2086 # words
    apt-get $options install -y --no-install-recommends $missing </dev/null >/dev/null
else
    echo "error:$missing not found; as root run: apt-get install$missing" >&2
    exit 2
fi
