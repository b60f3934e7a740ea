#!/usr/bin/env bash
# Compares vllm_lite with its peers on this machine's CPU; README.md beside this file says how.
# PYTHON= chooses the interpreter that vllm_lite and requirements/dev.txt are installed in.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
PYTHONPATH=python:bench exec "$python" -m peers "$@"
