#!/usr/bin/env bash
# Fills a folder with wheels for a machine with a GPU, torch and no network: this project and what may be missing there,
# for the Python that is named (3.12 unless PYTHON_VERSION says otherwise) on Linux x86_64. benchmarks/README.md says how
# they are used. Not torch, torchvision, lightning, torchmetrics, tensorboard and numpy: that machine must have them.
set -euo pipefail
folder=$(realpath -m "${1:?the folder for the wheels}")
root=$(cd "$(dirname "$0")/.." && pwd)
pip=("${PYTHON:-python3}" -m pip)
mkdir -p "$folder"

"${pip[@]}" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" "$root"

# Each with all that it needs, as nothing is resolved.
packages=(
    'jsonargparse>=4.53' docstring-parser typeshed-client importlib-resources 'typing-extensions>=4.13' 'pyyaml>=6.0.1'
    'matplotlib>=3.10.8' contourpy cycler fonttools kiwisolver packaging pyparsing python-dateutil six tzdata 'pillow>=11.0'
    'psutil>=6.0' 'rich>=13.9' markdown-it-py mdurl pygments
    'pytest>=8.3' iniconfig pluggy 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' execnet 'pytest-randomly>=3.16' 'pytest-split>=0.11'
)
platforms=()
for tag in manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
    platforms+=(--platform "$tag")
done
"${pip[@]}" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
    --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --dest "$folder" "${packages[@]}"

du --summarize --human-readable "$folder"
