#!/bin/sh
# Installs Slurm, munge and shellcheck from Debian for `make test-slurm`, without starting their services.
set -eu
missing=
for name in slurmctld slurmd munged sbatch shellcheck; do
    command -v "$name" >/dev/null || PATH=$PATH:/usr/sbin command -v "$name" >/dev/null || missing="$missing $name"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "error: no$missing; on Debian or Ubuntu, as root: apt-get install slurmctld slurmd slurm-client munge shellcheck" >&2
    exit 2
fi
# Their services would start with the system's own configuration: this test brings its own. A policy of the system stays.
policy=/usr/sbin/policy-rc.d
[ -e "$policy" ] || { trap 'rm -f "$policy"' EXIT && printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"; }
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    slurmctld slurmd slurm-client munge shellcheck >/dev/null
