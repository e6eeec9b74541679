"""Real pools of SGLang, and what the layout makes of each: slots, halves, bytes of its first layer, what is not watched.

    python tests/conformance/sglang/pools.py

Exit status 1 where a token that a pool stores does not lie where the layout says.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

from engine import ENVIRONMENT

SIZE, PAGE = 32, 4
COMMON = {"size": SIZE, "page_size": PAGE, "device": "cpu", "enable_memory_saver": False}
MHA = {"head_num": 2, "head_dim": 16, "layer_num": 2}
MLA = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "layer_num": 2}


def pools() -> dict[str, Any]:
    """Return what makes each pool, by name."""
    import torch
    from sglang.srt.mem_cache import memory_pool as mp
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    half = {"dtype": torch.bfloat16}
    linear = {"full_attention_layer_ids": [3, 7], "mamba_pool": None, "size": SIZE, "page_size": PAGE, "device": "cpu"}
    return {
        "mha": lambda: mp.MHATokenToKVPool(**COMMON, **MHA, **half),
        "mla": lambda: mp.MLATokenToKVPool(**COMMON, **MLA, **half),
        "hybrid linear": lambda: mp.HybridLinearKVPool(**linear, **half, head_num=2, head_dim=16),
        "hybrid linear, MLA": lambda: mp.HybridLinearKVPool(
            **linear, **half, head_num=1, head_dim=80, use_mla=True, kv_lora_rank=64, qk_rope_head_dim=16
        ),
        "swa": lambda: SWAKVPool(
            size=SIZE,
            size_swa=SIZE // 2,
            page_size=PAGE,
            head_num=2,
            head_dim=16,
            swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1, 3],
            device="cpu",
            enable_memory_saver=False,
            **half,
        ),
        "no-op": lambda: mp.NoOpMHATokenToKVPool(**COMMON, **MHA, **half),
        "page-major": lambda: mp.PageMajorMHATokenToKVPool(**COMMON, **MHA, **half),
    }


def main() -> int:
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):  # read at the interpreter's start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    import numpy as np
    import torch
    from kvcanary.recorder.capture.kv_tensor import KvTensor
    from kvcanary.recorder.engines.sglang.layout import POOLS, SglangLayout
    from kvcanary.recorder.process.settings import RecordingSettings

    wrong = 0
    for name, make in pools().items():
        try:
            pool = make()
        except Exception as error:  # noqa: BLE001  # told, whatever it is
            print(f"{name}: not made here: {type(error).__name__} {str(error)[:200]}")
            continue
        lut = torch.zeros(SIZE + PAGE, dtype=torch.int64)
        if name == "swa":
            pool.register_mapping(lut)
        runner = SimpleNamespace(
            is_draft_worker=False,
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((3, 8), dtype=torch.int32)),
            token_to_kv_pool=pool,
            sliding_window_size=8,
        )
        layout = SglangLayout([runner], RecordingSettings(folder=None, capture_bytes=1 << 20))
        for number, group in enumerate(layout.groups):
            own = {"full": getattr(pool, "full_kv_pool", pool), "swa": getattr(pool, "swa_kv_pool", None)}[group.kind]
            last = group.num_slots - 1
            for s, stream in enumerate(group.streams):
                first = getattr(own, POOLS[type(own).__name__][stream.half])[0]
                first[last] = 3.0
                source, stored = layout.sources[number, s], first[last].reshape(-1).view(torch.uint8).numpy()
                if isinstance(source, KvTensor):  # of all layers
                    of_first = KvTensor(tensor=source.tensors[0], axes=source.axes, first_slot=source.first_slot)
                    rows = of_first.gather(np.arange(group.num_slots), stored.size)
                else:
                    rows = np.asarray(source.tensor).reshape(group.num_slots, -1)
                wrong += not np.array_equal(rows[last], stored) or bool(rows[:last].any())
            wrong += not group.streams or group.num_slots < int(own.size) + PAGE
            shown = (group.kind, group.num_slots, group.halves, group.num_layers, [s.layer for s in group.streams])
            print(f"{name}: {type(own).__name__} {shown}")
        for entry in layout.not_watched:
            print(f"{name}: not watched: {entry.what} {entry.name}: {entry.reason}")
        wrong += not layout.groups and not layout.not_watched
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
