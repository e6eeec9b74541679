"""The runs on a GPU: engines with and without graphs, overlap, EAGLE, sliding windows; each fault; sweeps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """One run; `canary` False is a run without SGLang's own canary, to hold outputs against; `recorded` False alike."""

    name: str
    model: str = "llama_gpu"
    graph: bool = True
    overlap: bool = True
    eagle: bool = False
    topk: int = 1  # branches of what EAGLE drafts
    page: int = 1
    sweep: int = 0
    fault: str = ""
    probability: float = 0.4
    group: str = "full"
    canary: bool = True
    recorded: bool = True
    retract: bool = False
    revert: int = 0  # a pull request whose fix SGLang takes back, by its own switch for that
    damage: str = ""  # what plugin.py does within a forward, after the online canary's TAIL or around it
    saves: bool = False  # forwards save states of recurrent layers often, every 16 tokens
    longer: int = 1  # times as long are prompts and the chunks that they are computed in
    turns: int = 0  # how often the first requests come again, with what they have got and some more
    again: int = 0  # how often the first prompts come again after others took their place
    adapters: bool = False  # requests of two LoRA adapters and of none
    host_cache: str = ""  # "host": HiCache; "storage": with files behind it
    seed: int = 1

    @property
    def faulty(self) -> bool:
        """Whether something is wrong with the engine that no `fault` tells."""
        return bool(self.revert or self.damage)

    @property
    def states_watched(self) -> bool:
        """Whether the states of recurrent layers are recorded."""
        return self.model in (RECURRENT, GATED) and self.recorded

    @property
    def tokens_checked_online(self) -> bool:
        """Inside a CUDA graph the online canary's valid token lengths stay 0, so it compares no tokens there."""
        return not self.graph

    def environment(self) -> dict[str, str]:
        """What the engine's canary, its fault injector and its switch for testing retraction read."""
        env = {}
        if self.canary:
            env |= {
                "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1",
                "SGLANG_KV_CANARY_ENABLE_MHA_V": "1",
                "SGLANG_KV_CANARY_RING_CAPACITY": "1000000",
            }
        if self.fault:
            env |= {
                f"SGLANG_KV_CANARY_PERTURB_{self.fault}_PROB": str(self.probability),
                "SGLANG_KV_CANARY_PERTURB_TARGET_GROUP": self.group,
                "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS": "4",
            }
        if self.revert:
            env["SGLANG_DEBUG_REVERT_PR"] = str(self.revert)
        if self.adapters:
            env["CONFORMANCE_ADAPTERS"] = "1"
        if self.damage:
            env["CONFORMANCE_DAMAGE"] = self.damage
        if self.retract:
            env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
        return env


REQ, USED, POST, UNUSED = "REQ_TO_TOKEN", "REAL_KV_USED", "REAL_KV_POST_FORWARD", "REAL_KV_UNUSED_CACHE"
HYBRID = "mellum_hybrid"
RECURRENT, GATED = "falcon_h1", "qwen3_next"

RUNS = (
    # what recording changes of the outputs: nothing
    GpuRun(name="off", canary=False, recorded=False),
    GpuRun(name="recorded", canary=False),
    GpuRun(name="eagle-off", eagle=True, canary=False, recorded=False),
    GpuRun(name="eagle-recorded", eagle=True, canary=False),
    # trees of drafts, of which only what they fill is recorded
    GpuRun(name="eagle-tree-off", eagle=True, topk=4, canary=False, recorded=False, turns=1),
    GpuRun(name="eagle-tree-recorded", eagle=True, topk=4, canary=False, turns=1),
    GpuRun(name="eagle-tree-eager-recorded", eagle=True, topk=4, graph=False, canary=False, turns=1),
    GpuRun(name="eagle-tree-page16-recorded", eagle=True, topk=4, page=16, canary=False, turns=1),
    GpuRun(name="hybrid-off", model=HYBRID, canary=False, recorded=False),
    GpuRun(name="hybrid-recorded", model=HYBRID, canary=False),
    # what others push out of the pool comes back from the host, and from files behind it
    *(
        GpuRun(
            name=f"{name}-{kind}", page=16, canary=False, recorded=kind == "recorded", again=4, host_cache=host_cache
        )
        for name, host_cache in (("host-cache", "host"), ("host-cache-storage", "storage"))
        for kind in ("off", "recorded")
    ),
    *(
        GpuRun(name=f"host-cache-{what}", page=16, canary=False, again=4, host_cache="host", damage=f"host-{what}")
        for what in ("stored", "another", "changed", "nothing")
    ),
    *(
        GpuRun(
            name=f"adapters-{kind}",
            page=16,
            canary=False,
            recorded=kind != "off",
            again=2,
            adapters=True,
            damage="adapters" if kind == "mixed-up" else "",
        )
        for kind in ("off", "recorded", "mixed-up")
    ),
    # Mamba layers, whose pool the online canary does not know; with overlap forwards save checkpoints themselves
    GpuRun(name="recurrent-eager-off", model=RECURRENT, graph=False, canary=False, recorded=False),
    GpuRun(name="recurrent-eager-recorded", model=RECURRENT, graph=False, canary=False),
    GpuRun(name="recurrent-graph-off", model=RECURRENT, overlap=False, canary=False, recorded=False, turns=2),
    GpuRun(name="recurrent-graph-recorded", model=RECURRENT, overlap=False, canary=False, turns=2),
    GpuRun(name="recurrent-eager-plain-recorded", model=RECURRENT, graph=False, overlap=False, canary=False, turns=2),
    *(
        GpuRun(
            name=f"recurrent-{'graph' if graph else 'eager'}-{damage}",
            model=RECURRENT,
            graph=graph,
            overlap=False,
            canary=False,
            damage=f"state-{damage}",
            turns=2,
        )
        for graph in (True, False)
        for damage in ("another", "shared", "late", "overwritten")
    ),
    GpuRun(name="recurrent-saves-off", model=RECURRENT, canary=False, recorded=False, saves=True, turns=2),
    *(
        GpuRun(
            name=f"recurrent-saves-{'graph' if graph else 'eager'}-{damage or 'recorded'}",
            model=RECURRENT,
            graph=graph,
            canary=False,
            damage=f"state-{damage}" if damage else "",
            saves=True,
            turns=2,
        )
        for graph in (True, False)
        for damage in ("", "another", "overwritten", "earlier", "elsewhere")
    ),
    # gated delta nets, which save states every 64 tokens
    GpuRun(name="gated-off", model=GATED, canary=False, recorded=False, longer=4, turns=2),
    *(
        GpuRun(
            name=f"gated-{'graph' if graph else 'eager'}-{damage or 'recorded'}",
            model=GATED,
            graph=graph,
            canary=False,
            damage=f"state-{damage}" if damage else "",
            longer=4,
            turns=2,
        )
        for graph in (True, False)
        for damage in ("", "another", "earlier", "elsewhere")
    ),
    # beside the online canary
    GpuRun(name="none", sweep=4),
    GpuRun(name="none-page16-retract", page=16, sweep=4, retract=True),
    GpuRun(name="eager-REQ", graph=False, fault=REQ),
    GpuRun(name="eager-REQ-page16-no-overlap", graph=False, overlap=False, page=16, fault=REQ),
    GpuRun(name="graph-REQ", fault=REQ, seed=2),
    GpuRun(name="eager-USED-page16", graph=False, page=16, fault=USED),
    GpuRun(name="graph-USED", fault=USED, seed=3),
    GpuRun(name="eager-POST-page16", graph=False, page=16, sweep=3, fault=POST),
    GpuRun(name="graph-POST", sweep=3, fault=POST, seed=4),
    GpuRun(name="graph-UNUSED-page16", page=16, sweep=2, fault=UNUSED, probability=0.8, seed=2),
    GpuRun(name="hybrid-eager-REQ", model=HYBRID, graph=False, fault=REQ),
    GpuRun(name="hybrid-eager-POST-swa", model=HYBRID, graph=False, sweep=3, group="swa", fault=POST),
    GpuRun(name="hybrid-graph-USED-swa", model=HYBRID, group="swa", fault=USED, seed=2),
    GpuRun(name="eagle-none", eagle=True, sweep=4),
    GpuRun(name="eagle-USED-page16", eagle=True, page=16, fault=USED),
    GpuRun(name="eagle-eager-USED", eagle=True, graph=False, fault=USED, seed=2),
    GpuRun(name="eagle-eager-none-page32", eagle=True, graph=False, page=32),
    # real bugs: draft positions one off, and a chunked prefill's last draft token
    *(
        GpuRun(
            name=f"eagle-{'graph' if graph else 'eager'}-revert-{revert}-page{page}",
            eagle=True,
            graph=graph,
            page=page,
            revert=revert,
        )
        for revert in (25015, 26329)
        for graph, page in ((True, 1), (True, 4), (True, 16), (True, 32), (False, 1), (False, 32))
    ),
    # within a forward: a written slot flipped after the canary's TAIL, a table cell changed around it, what attention gets
    *(
        GpuRun(name=f"{'graph' if graph else 'eager'}-inside-{damage}", graph=graph, damage=damage)
        for graph in (True, False)
        for damage in ("kv", "table", "attention", "attention-lens")
    ),
)
