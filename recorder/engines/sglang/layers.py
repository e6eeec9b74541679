"""Models on the CPU, looked at right before their first layer and right after their last, as SGLang's canary does.

What a model is called with is another batch than the one that its runner is given: a copy in buffers of the runner's
own. And what is damaged between the last layer and the runner's return is damage to what was written, not written.

What attention is given is read there too: `torch_native` and `intel_amx` have no tables of their own, each of their layers
reads the batch's `seq_lens`, which count the tokens of this forward, but not those that a verify forward drafted, and the
rows of `req_to_token`. What layers with a sliding window read is seen of `torch_native` alone (`windows.py`): `intel_amx`
looks up their slots anew in each forward. Not read: cross-attention; any other backend.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ....kernels.arrays import Int64Array
from ...capture.attention import row_read
from ...capture.forward_input import AttentionInput
from ...capture.host_arrays import own_int64
from ...trace.header import NotWatched
from ..common.hooking import Finish, OnFault, StepCost, wrap_method
from .layout import RunnerLayout, SglangLayout
from .recurrent import backend_of_all

# Classes of backends, by their names, that read the batch's lengths and the rows of req_to_token.
ROW_READERS: Final = ("TorchNativeAttnBackend", "IntelAMXAttnBackend")

# Called with the model runner and the batch that its model is called with, before the first layer.
Begin = Callable[[Any, Any], Finish]


class ModelLayers:
    """What stands around the forward of each model of a process that runs on the CPU; what its hooks take adds to `cost`."""

    def __init__(self, on_fault: OnFault, cost: StepCost) -> None:
        self._on_fault = on_fault
        self._cost = cost
        self._wrapped: dict[int, Any] = {}  # model runners by their ids
        # The id of a runner whose model is about to be called, and what is to be called then, and after that.
        self.expected: tuple[int, Begin] | None = None

    def wrap(self, runner: Any) -> None:
        """Stand around a runner's model from now on, nearest to it: whoever wraps it later stands around this."""
        settings, model = getattr(runner, "server_args", None), getattr(runner, "model", None)
        on_cpu = str(getattr(runner, "device", "")).startswith("cpu")
        # Of one that is compiled the hook would be, too.
        if id(runner) in self._wrapped or not on_cpu or getattr(settings, "enable_torch_compile", False):
            return

        def on_layers(*args: Any, **kwargs: Any) -> Finish | None:
            expected = self.expected
            batch = None if expected is None or expected[0] != id(runner) else batch_among(args, kwargs)
            if expected is None or batch is None:
                return None
            self.expected = None
            return expected[1](runner, batch)

        if wrap_method(model, "forward", on_layers, self._on_fault, self._cost):
            self._wrapped[id(runner)] = runner

    def watches(self, runner: int) -> bool:
        """Say whether a runner's model is hooked; `runner` is its id."""
        return runner in self._wrapped


def batch_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the `ForwardBatch` among what a model is called with, None if there is none."""
    return next((one for one in (*args, *kwargs.values()) if hasattr(one, "forward_mode")), None)


def attention_input(
    model_runner: Any, batch: Any, mode: str, runner: RunnerLayout, layout: SglangLayout
) -> AttentionInput | None:
    """Return what attention gets in a forward, None if nobody knows; `batch` is the one that the model is called with."""
    backend = backend_of(model_runner, batch)
    if (
        type(backend).__name__ not in ROW_READERS
        or batch.seq_lens is None
        or getattr(batch, "encoder_lens", None) is not None
    ):
        return None
    rows, seq_lens, query_lens = own_int64(batch.req_pool_indices), own_int64(batch.seq_lens), queries_of(batch, mode)
    pool = getattr(backend, "req_to_token_pool", None) or batch.req_to_token_pool  # before 0.5.13 it takes the batch's
    table, own_rows = pool.req_to_token, rows
    drafted = getattr(backend, "draft_decode_metadata", None)
    if mode == "decode" and drafted is not None:
        table, seq_lens, own_rows = drafted[0], own_int64(drafted[1]), drafted[2]
    elif mode == "target_verify":
        if query_lens is None:
            return None
        seq_lens = seq_lens + query_lens
    if not seq_lens.size == rows.size == (rows if query_lens is None else query_lens).size:
        return None
    read = row_read(table, own_rows, seq_lens)
    slots = tuple(read if number == runner.groups.get("full") else None for number in range(len(layout.groups)))
    return AttentionInput(seq_lens=seq_lens, query_lens=query_lens, slots=slots)


def queries_of(batch: Any, mode: str) -> Int64Array | None:
    """Return how many tokens each request computes, `[bs]`, None if nobody knows."""
    if mode in ("decode", "target_verify"):  # the shape of its queries: as many for each request
        count = 1 if mode == "decode" else getattr(batch.spec_info, "draft_token_num", None)
        return None if count is None else np.full(batch.seq_lens.shape[0], int(count), np.int64)
    lens = getattr(batch, "extend_seq_lens", None)
    return None if lens is None else own_int64(lens)


def backend_of(model_runner: Any, batch: Any) -> Any:
    """Return the attention backend that a batch of a runner's goes through; of a hybrid one its part for this mode."""
    backend = backend_around(model_runner, batch)
    select = getattr(backend, "_select_backend", None)
    return select(batch.forward_mode) if callable(select) else backend


def backend_around(model_runner: Any, batch: Any) -> Any:
    """Return the attention backend of the forward that runs now, else that of the batch or of its runner.

    Of one that serves recurrent layers too it is the part for attention.
    """
    found = backend_of_all() or getattr(batch, "attn_backend", None) or getattr(model_runner, "attn_backend", None)
    return getattr(found, "full_attn_backend", found)


def attention_parts(model_runner: Any) -> list[Any]:
    """Return a runner's attention backends: one, or of a hybrid one its parts."""
    backend = getattr(model_runner, "attn_backend", None)
    backend = getattr(backend, "full_attn_backend", backend)
    parts = [part for name in ("prefill_backend", "decode_backend") if (part := getattr(backend, name, None))]
    return parts or [backend]


def not_read(
    model_runners: list[Any], layout: SglangLayout, sees_windows: Callable[[Any], bool] | None
) -> list[NotWatched]:
    """Return what of the runners' attention is not read.

    `sees_windows` says of which backends the layers with a window are looked at; None: no forward is recorded around its layers.
    """
    found = []
    for model_runner in model_runners:
        runner = layout.runners[id(model_runner)]
        name = layout.names[runner.index].name
        for part in attention_parts(model_runner):
            backend_name = type(part).__name__
            if backend_name not in ROW_READERS or sees_windows is None:
                unread = "what this attention backend is given is not read"
                reason = "its layers are not hooked" if sees_windows is None else unread
                found.append(NotWatched(what="other", name=f"{name}: {backend_name}", reason=reason))
            elif "swa" in runner.groups:
                reason = "nothing shows the slots that they read"
                if sees_windows(part):
                    reason = "which pool's numbers they read their slots by; other slots than a request's are seen"
                found.append(NotWatched(what="other", name=f"{name}: {backend_name}, sliding layers", reason=reason))
    return list(dict.fromkeys(found))
