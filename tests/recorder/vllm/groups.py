"""A group of vLLM's KV cache, as the adapter sees it."""

from kvcanary.recorder.engines.vllm.layout import VllmGroup


def group(block_size: int, window: int = 0) -> VllmGroup:
    return VllmGroup(
        index=0,
        gid=0,
        name="g",
        kind="swa" if window else "full",
        window=window,
        block_size=block_size,
        num_blocks=64,
        layers=("l",),
        spec=None,
    )
