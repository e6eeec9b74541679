#!/usr/bin/env bash
# install.sh VERSION, and from 0.5.19 on a planted patch: the allocator puts the first slot of each free into its list twice.
# For `kvcanary bisect run` (docs/guide/bisect.md): the versions are real, the fault is not.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
bash "$here/install.sh" "$1"
if [ "$(printf '%s\n' 0.5.19 "$1" | sort -V | head -1)" = 0.5.19 ]; then
  sed -i 's/_pages, free_index))/_pages, free_index, free_index[:1]))/' \
    "$VIRTUAL_ENV"/lib/python*/site-packages/sglang/srt/mem_cache/allocator/token.py
fi
