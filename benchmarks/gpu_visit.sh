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
unset PYTHONPATH # what is there already counts as installed
if [[ -n $wheels ]]; then # beside the packages of this Python and before them
    folder=$(mktemp -d)
    "$python" -m venv --without-pip --system-site-packages "$folder"
    packages=$(echo "$folder"/lib/python*/site-packages)
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$packages/here.pth"
    "$python" -m pip --python "$folder/bin/python" install --quiet --no-index --no-deps "$wheels"/*.whl
    python=$folder/bin/python
fi
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$root/benchmarks/scripts:$root/notebooks:$root"
exec "$python" -m gpu_visit "${words[@]}"
