#!/bin/sh
# Installs into the image being built, with the pip of the stage `pip`, which is mounted at /pip:
#
#   install.sh OPTION…          files of hashes (-r FILE), into $INTO, by default /opt/rlearner
#   install.sh resolve WHAT…    packages with what they need, for what has no hashes
#   install.sh own              the project's wheel, below /opt/own
set -eu
pip() {
    PYTHONPATH=$(echo /pip/lib/python3*/site-packages) python3 -m pip --python "${INTO:-/opt/rlearner}/bin/python" \
        --no-cache-dir --disable-pip-version-check install --quiet "$@"
}
if test -e /run/secrets/ca.pem; then export PIP_CERT=/run/secrets/ca.pem; fi
case "$1" in
    own) pip --no-index --no-deps --prefix /opt/own /dist/*.whl ;;
    resolve) shift && pip --find-links /wheels "$@" ;;
    *) pip --find-links /wheels --no-deps --no-build-isolation --require-hashes "$@" ;;
esac
