#!/usr/bin/env bash
# What twenty minutes on a machine with GPUs can tell; benchmarks/README.md says how to run it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3} words=() wheels=
ulimit -c 0
while (($#)); do
    case $1 in
    --wheels=*) wheels=${1#*=} ;;
    --wheels) wheels=$2 && shift ;;
    *) words+=("$1") ;;
    esac
    shift
done
if [[ -n $wheels ]]; then # beside the packages of this Python, those of the wheels that it lacks
    folder=$(mktemp -d)
    "$python" -m venv --without-pip --system-site-packages "$folder"
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' | tee "$folder"/lib/python*/site-packages/here.pth >/dev/null
    "$python" -m pip --python "$folder/bin/python" install --quiet --no-index --find-links "$wheels" 'lit-cifar[test]'
    python=$folder/bin/python
fi
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$root/benchmarks/scripts:$root"
exec "$python" -m gpu_visit "${words[@]}"
