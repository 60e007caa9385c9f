#!/bin/sh
# Installs into /opt/rlearner of the image being built, with the pip of the stage build, which is mounted at /build:
# files of hashes with pip's options for them, or `own`: the project's wheel.
set -eu
pip() {
    PYTHONPATH=$(echo /build/pip/lib/python3*/site-packages) \
        python3 -m pip --python /opt/rlearner/bin/python --no-cache-dir --disable-pip-version-check "$@"
}
if test -e /run/secrets/ca.pem; then export PIP_CERT=/run/secrets/ca.pem; fi
if test "$1" = own; then
    pip install --quiet --no-index --no-deps /build/dist/*.whl
else
    pip install --quiet --find-links /wheels --no-deps --no-build-isolation --require-hashes "$@"
fi
