#!/bin/sh
# Prepares what make test-systemd boots, in the folder of the first argument: a Debian tree with systemd and Python.
# As root, on Debian; installs systemd-container and debootstrap.
set -eu
tree=$1
[ "$(id -u)" = 0 ] || { echo "error: test-systemd boots a machine, so it must run as root"; exit 2; }
[ -d /run ] && [ "$(uname -s)" = Linux ] || { echo "error: test-systemd needs Linux"; exit 2; }
if ! command -v systemd-nspawn >/dev/null || ! command -v debootstrap >/dev/null; then
    echo "installing systemd-container and debootstrap"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get -qq install -y --no-install-recommends systemd-container debootstrap </dev/null >/dev/null
fi
[ -e "$tree/ready" ] && exit 0
echo "making a Debian tree in $tree (a minute)"
rm -rf "$tree.new"
mkdir -p "$(dirname "$tree")"
debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,bubblewrap,python3,procps bookworm "$tree.new" >"$tree.log" \
    || { echo "error: debootstrap failed, see $tree.log"; exit 2; }
touch "$tree.new/ready"
mv "$tree.new" "$tree"
