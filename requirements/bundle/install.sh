#!/bin/sh
# Installs rlearner from this folder without a network: sh install.sh [--target FOLDER] [--model-folder FOLDER]
# PYTHON names the interpreter (python3). The last line printed sets the variables: eval "$(sh install.sh)".
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 2
python=${PYTHON:-python3}
command -v "$python" >/dev/null 2>&1 || { echo "error: PYTHON: there is no program $python" >&2; exit 2; }
exec "$python" "$here/install.py" "$@"
