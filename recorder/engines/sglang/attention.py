"""What SGLang's attention backends on the CPU are given, read where their kernels take it.

`torch_native` and `intel_amx` have no tables of their own: in each layer they read the batch's `seq_lens` and the rows of
`req_to_token`. So that is what is read, once before the first layer and once after the last. Their `seq_lens` count the
tokens of this forward too, but for a verify forward, where the drafted tokens come on top of them.

Not read: what layers with a sliding window read through the full-to-SWA table, which `intel_amx` looks up anew in each
forward; cross-attention; any other backend.
"""

from typing import Any, Final

from ...capture.attention import row_read
from ...capture.forward_input import AttentionInput
from ...capture.host_arrays import Int64Array, own_int64
from ...trace.header import NotWatched
from .layout import Layout, RunnerLayout

# Classes of backends, by their names, that read the batch's lengths and the rows of req_to_token.
ROW_READERS: Final = ("TorchNativeAttnBackend", "IntelAMXAttnBackend")


def attention_input(
    model_runner: Any, batch: Any, mode: str, runner: RunnerLayout, layout: Layout
) -> AttentionInput | None:
    """Return what attention gets in a forward, None where nobody knows.

    Args:
        model_runner: SGLang's.
        batch: the `ForwardBatch` that its model is called with.
        mode: the forward's, as the trace has it.
        runner: where the runner's tables and groups are.
        layout: the engine's pools.
    """
    backend = backend_of(model_runner, batch)
    if (
        type(backend).__name__ not in ROW_READERS
        or batch.seq_lens is None
        or getattr(batch, "encoder_lens", None) is not None
    ):
        return None
    rows, seq_lens, query_lens = own_int64(batch.req_pool_indices), own_int64(batch.seq_lens), _query_lens(batch, mode)
    drafted = getattr(backend, "draft_decode_metadata", None)
    if mode == "decode" and drafted is not None:
        seq_lens = own_int64(drafted[1])
    elif mode == "target_verify":
        if query_lens is None:
            return None
        seq_lens = seq_lens + query_lens
    if not seq_lens.size == rows.size == (rows if query_lens is None else query_lens).size:
        return None
    table = backend.req_to_token_pool.req_to_token if drafted is None or mode != "decode" else drafted[0]
    kinds = {number: kind for kind, number in runner.groups.items()}
    read = row_read(table, rows if drafted is None or mode != "decode" else drafted[2], seq_lens)
    slots = tuple(read if kinds.get(number) == "full" else None for number in range(len(layout.groups)))
    return AttentionInput(seq_lens=seq_lens, query_lens=query_lens, slots=slots)


def _query_lens(batch: Any, mode: str) -> Int64Array | None:
    if mode == "decode":
        return own_int64(batch.seq_lens) * 0 + 1  # the shape of its queries: one for each request
    if mode == "target_verify":
        count = getattr(batch.spec_info, "draft_token_num", None)
        return None if count is None else own_int64(batch.seq_lens) * 0 + int(count)
    lens = getattr(batch, "extend_seq_lens", None)
    return None if lens is None else own_int64(lens)


def backend_of(model_runner: Any, batch: Any) -> Any:
    """Return the attention backend that a batch of a runner's goes through; of a hybrid one its part for this mode."""
    try:
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = get_attn_backend()
    except Exception:  # noqa: BLE001  # another version has it elsewhere, and raises outside of a forward
        backend = getattr(batch, "attn_backend", None) or getattr(model_runner, "attn_backend", None)
    select = getattr(backend, "_select_backend", None)
    return select(batch.forward_mode) if callable(select) else backend


def not_read(model_runners: list[Any], layout: Layout, *, inside: bool) -> list[NotWatched]:
    """Return what of the runners' attention is not read; `inside`: their forwards are taken down around their layers."""
    found = []
    for model_runner in model_runners:
        runner = layout.runners.get(id(model_runner))
        if runner is None:
            continue
        backend = getattr(model_runner, "attn_backend", None)
        parts = [part for name in ("prefill_backend", "decode_backend") if (part := getattr(backend, name, None))]
        name = layout.names[runner.index].name
        for part in parts or [backend]:
            backend_name = type(part).__name__
            if backend_name not in ROW_READERS or not inside:
                reason = "what this attention backend is given is not read" if inside else "its layers are not hooked"
                found.append(NotWatched(what="other", name=f"{name}: {backend_name}", reason=reason))
            elif "swa" in runner.groups:
                reason = "which slots they read is not told by this backend"
                found.append(NotWatched(what="other", name=f"{name}: {backend_name}, sliding layers", reason=reason))
    return list(dict.fromkeys(found))
