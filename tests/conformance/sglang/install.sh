#!/usr/bin/env bash
# Installs SGLang for CPU and this checkout into the active virtual environment (Python 3.11; 2 minutes, 2.6 GB).
# SGLang's own requirements are for GPUs and are not wanted, but for its transformers; what is absent is stood in for by
# standin/sitecustomize.py. `install.sh 0.5.16` installs another version; seen working: 0.5.11 to 0.5.23.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=${1:-0.5.23}
pip="python -m pip --disable-pip-version-check install -q"
$pip torch==2.13.0
$pip --no-deps --ignore-installed "sglang==$version"  # here, also if an environment that is shared has it
$pip --no-deps torchvision==0.28.0 xgrammar==0.2.7
# pip names what sglang asks for and does not get; none of it is used on a CPU
transformers=$(python -c 'import importlib.metadata as m; print(next(r for r in m.requires("sglang") if r.startswith("transformers==")))')
$pip "$transformers" triton==3.9.0 numpy==2.4.6 orjson psutil pybase64 requests packaging pillow msgspec pyzmq tqdm \
  ipython aiohttp pydantic dill apache-tvm-ffi sentencepiece compressed-tensors gguf openai partial-json-parser einops \
  uvloop uvicorn fastapi setproctitle prometheus_client jsonschema soundfile python-multipart
# Not in an environment that is shared. -P: the checkout's own egg-info, which `make test` leaves, is no installation.
if ! python -P -c 'import importlib.metadata as m; m.version("kvcanary")' 2>/dev/null; then
  $pip -c "$here/../../../constraints.txt" click crc32c duckdb numba pyarrow rich 2>/dev/null || $pip click crc32c duckdb numba pyarrow rich
  $pip --no-deps -e "$here/../../.."
fi
cp "$here/standin/sitecustomize.py" "$(python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/"
