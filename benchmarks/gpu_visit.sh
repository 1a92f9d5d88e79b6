#!/usr/bin/env bash
# What ten minutes on a machine with one GPU can tell; benchmarks/README.md says how to run it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
ulimit -c 0
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$root/benchmarks:$root"
exec "${PYTHON:-python3}" -m gpu_visit "$@"
