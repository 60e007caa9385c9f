#!/bin/sh
# Installs bubblewrap where it may: as root, with apt-get. Elsewhere, and where it fails, says in one line how.
# It never fails: only rewards and tools that run programs need the sandbox.
found() { command -v "$1" >/dev/null 2>&1; }

found bwrap && exit 0
if [ "$(id -u)" = 0 ] && found apt-get; then
    echo "installing bubblewrap, the sandbox for programs that a policy writes"
    export DEBIAN_FRONTEND=noninteractive
    options="-qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60"
    { apt-get $options update; apt-get $options install -y --no-install-recommends bubblewrap; } </dev/null >/dev/null 2>&1
fi
found bwrap || echo "bubblewrap is not installed, so tests of the sandbox are skipped; as root run: apt-get install bubblewrap"
