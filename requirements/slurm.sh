#!/bin/sh
# Installs Slurm, munge and shellcheck from Debian for `make test-slurm`, without starting their services.
set -eu
PATH=$PATH:/usr/sbin
missing=
for name in slurmctld slurmd munged sbatch shellcheck; do
    command -v "$name" >/dev/null || missing="$missing $name"
done
[ -n "$missing" ] || exit 0
packages="slurmctld slurmd slurm-client munge shellcheck"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: not found:$missing; on Debian or Ubuntu, run as root: apt-get install $packages" >&2
    exit 2
fi
# The services would start with the system's configuration; the test brings its own. A policy of the system stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
options="-qq -o Acquire::Retries=1 -o DPkg::Lock::Timeout=60"
# shellcheck disable=SC2086
apt-get $options update
# shellcheck disable=SC2086
apt-get $options install -y --no-install-recommends $packages >/dev/null
