"""The runs on a GPU: both model runners, with and without graphs and compilation; clean ones and one for each fault."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """One engine; `base` is the run whose tokens are to be the same, itself for one that is not recorded."""

    name: str
    base: str = ""
    model: str = "llama"
    runner: str = "v2"
    graph: str = "NONE"
    compiled: bool = False
    asynchronous: bool = True
    blocks: int = 128
    ngram: bool = False
    draft: str = ""  # how a draft model drafts
    attention: str = ""
    kv_dtype: str = "auto"
    connector: str = ""  # which may load the prompts of the second batch; `loads`: these come without one, too
    loads: bool = False
    spawned: bool = False  # the engine core in a process of its own
    sweep: int = 0
    history: str = "auto"
    outputs: int = 1  # one of so many of those forwards is looked at that can be, 0: none
    fault: str = ""
    seed: int = 1

    @property
    def recorded(self) -> bool:
        """Whether the engine is recorded."""
        return bool(self.base)


FULL, BOTH = "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"
FAULTS = ("block_table", "slot_mapping", "token", "position", "kv_byte")
DRAFT_FAULTS = ("draft_position", "draft_seq_lens", "draft_slot_mapping", "draft_table", "draft_token")
LOAD_FAULTS = (
    *("store_wrong", "store_twice", "key_collides", "load_elsewhere", "load_other_block", "load_layout", "load_late"),
    "load_missing",
)
SHAPES: dict[str, dict] = {
    "eager": {},
    "graphs": {"graph": FULL},
    "compiled": {"graph": BOTH, "compiled": True},
    "graphs-no-async": {"graph": FULL, "asynchronous": False},
    "graphs-few-blocks": {"graph": FULL, "blocks": 18},
    "eager-few-blocks": {"blocks": 18},
    "graphs-hybrid": {"model": "hybrid", "graph": FULL},
    "eager-sliding": {"model": "sliding"},
    "graphs-hybrid-few-blocks": {"model": "hybrid", "graph": FULL, "blocks": 40},
    "graphs-sweeps": {"graph": FULL, "sweep": 7},
    "graphs-triton": {"graph": FULL, "attention": "TRITON_ATTN"},
    "graphs-spawned": {"graph": FULL, "spawned": True},
}
PLAIN = {model: f"v1-plain-{model}" for model in ("llama", "hybrid", "sliding", "mrope", "lfm2", "olmo_hybrid")}


def _runs() -> tuple[GpuRun, ...]:
    found = [GpuRun(name=name, model=model, runner="v1") for model, name in PLAIN.items()]
    # Other kernels may round otherwise.
    found += [GpuRun(name=f"v2-plain-{shape}", **SHAPES[shape]) for shape in ("compiled", "graphs-triton")]
    for runner in ("v1", "v2"):
        for shape, options in SHAPES.items():
            own = f"v2-plain-{shape}"
            base = own if any(run.name == own for run in found) else PLAIN[options.get("model", "llama")]
            found.append(GpuRun(name=f"{runner}-{shape}", base=base, runner=runner, **options))
        for number, fault in enumerate(FAULTS, 2):
            for shape in ("eager", "graphs", "graphs-hybrid"):
                name = f"{runner}-{shape}-{fault}"
                found.append(GpuRun(name=name, base="none", runner=runner, fault=fault, seed=number, **SHAPES[shape]))
        for fault, shape in (("late_layer", "eager"), ("late_layer", "graphs"), ("nan_value", "eager")):
            if fault == "nan_value" and runner == "v2":  # whose sampler ends the engine where logits are NaN
                continue
            name = f"{runner}-{shape}-{fault}"
            found.append(GpuRun(name=name, base="none", runner=runner, fault=fault, seed=7, **SHAPES[shape]))
        for shape in ("eager", "graphs", "compiled", "graphs-triton"):
            name = f"{runner}-{shape}-kernel_window"
            found.append(GpuRun(name=name, base="none", runner=runner, fault="kernel_window", **SHAPES[shape]))
        narrow = {"base": "none", "runner": runner, "attention": "TRITON_ATTN"}
        for shape in ("eager", "graphs"):
            found.append(GpuRun(name=f"{runner}-{shape}-fp8", kv_dtype="fp8", **SHAPES[shape], **narrow))
        found.append(GpuRun(name=f"{runner}-fp8-wide_value", kv_dtype="fp8", fault="wide_value", seed=7, **narrow))
        for shape in ("eager", "graphs", "compiled", "eager-few-blocks"):
            options = {"model": "mrope", "runner": runner, **SHAPES[shape]}
            found.append(
                GpuRun(
                    name=f"{runner}-mrope-{shape}", base="none" if shape == "compiled" else PLAIN["mrope"], **options
                )
            )
            if shape in ("eager", "graphs"):
                found += [
                    GpuRun(name=f"{runner}-mrope-{shape}-{fault}", base="none", fault=fault, seed=5, **options)
                    for fault in ("position", "slot_mapping")
                ]
    # n-gram drafts run on the V1 runner; what they accept changes nothing of the tokens.
    found.append(GpuRun(name="v1-ngram", base=PLAIN["llama"], runner="v1", asynchronous=False, ngram=True))
    return (*found, *_drafts(), *_recurrent(), *_loads())


def _loads() -> tuple[GpuRun, ...]:
    """Return the runs in which K and V go to the host, or to files, and come back."""
    found = [GpuRun(name="v1-plain-loads", runner="v1", loads=True)]
    offloads = {"loads": True, "connector": "OffloadingConnector"}
    for runner in ("v1", "v2"):
        given = offloads | {"runner": runner}
        for shape in ("eager", "graphs", "graphs-few-blocks", "graphs-sweeps"):
            found.append(GpuRun(name=f"{runner}-offloads-{shape}", base="v1-plain-loads", **SHAPES[shape], **given))
        found.append(GpuRun(name=f"{runner}-offloads-hybrid", base="none", model="hybrid", **given))
        files = {"connector": "ExampleConnector", "loads": True, "runner": runner}
        found.append(GpuRun(name=f"{runner}-files", base="none", **files))
        for number, fault in enumerate(LOAD_FAULTS, 2):
            name = f"{runner}-offloads-{fault}"
            found.append(GpuRun(name=name, base="none", fault=fault, seed=number, **SHAPES["graphs"], **given))
    return tuple(found)


def _recurrent() -> tuple[GpuRun, ...]:
    """Return the runs with short convolutions and with gated delta nets, whose states are watched."""
    found = []
    recurrent: dict[str, dict] = {
        "eager": {},
        "graphs": {"graph": FULL},
        "graphs-few-blocks": {"graph": FULL, "blocks": 24},
    }
    for layers, model in (("recurrent", "lfm2"), ("delta", "olmo_hybrid")):
        for shape, options in recurrent.items():
            for runner in ("v1", "v2"):
                name = f"{runner}-{layers}-{shape}"
                found.append(GpuRun(name=name, base=PLAIN[model], model=model, runner=runner, **options))
                # What a V2 runner's layers are given is made anew behind where the others are injected.
                faults = ("state_byte", "state_block", "state_begin", "state_copy")
                faults = faults[: 1 if shape != "eager" or runner == "v2" else None]
                for fault in faults if shape != "graphs-few-blocks" else ():
                    one = GpuRun(
                        name=f"{name}-{fault}", base="none", model=model, runner=runner, fault=fault, seed=3, **options
                    )
                    found.append(one)
    return tuple(found)


def _drafts() -> tuple[GpuRun, ...]:
    """Return the runs with draft models."""
    found = []
    for runner in ("v1", "v2"):
        eagle = {"runner": runner, "draft": "eagle"}
        plain, name = f"{runner}-plain-eagle", f"{runner}-eagle"
        found.append(GpuRun(name=plain, asynchronous=False, **eagle))
        found.append(GpuRun(name=name, base=plain, asynchronous=False, **eagle))
        for shape in ("eager", "graphs", "compiled", "eager-few-blocks", "graphs-hybrid", "graphs-sweeps"):
            found.append(GpuRun(name=f"{name}-{shape}", base="none", **eagle, **SHAPES[shape]))
        found.append(GpuRun(name=f"{runner}-draft-model", base="none", runner=runner, draft="draft_model"))
        for number, fault in enumerate(DRAFT_FAULTS, 2):
            found.append(GpuRun(name=f"{name}-{fault}", base="none", fault=fault, seed=number, **eagle))
        for number, fault in enumerate(("draft_position", "draft_table", "draft_token"), 2):
            one = GpuRun(name=f"{name}-graphs-{fault}", base="none", fault=fault, seed=number, graph=FULL, **eagle)
            found.append(one)
    return tuple(found)


RUNS = _runs()
