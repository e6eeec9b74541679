"""The faults of ../draft_faults.py in the V2 runner's drafter, whose inputs lie in buffers of its own.

What is done to its first forward is there within that one's CUDA graph too; what is done to one behind it is where each is
called by itself: without graphs.
"""

import functools
from typing import Any

from both_runners import GpuInjector, ShownAsV1
from draft_faults import AT_FIRST, AT_STEP


def install_v2_draft_faults(injector: "V2DraftInjector") -> None:
    """Have a fault put where the drafter is at its stage, once for each that is due."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator as Speculator

    prepare, propose = GPUModelRunner.prepare_attn, Speculator.propose
    begin, generate = Speculator.on_prefill_begin, Speculator._generate_draft
    runners: list[Any] = []

    def noting_prepare(runner: Any, batch: Any) -> Any:
        runners[:] = [runner]
        return prepare(runner, batch)

    @functools.wraps(propose)
    def faulty_propose(speculator: Any, *args: Any, **kwargs: Any) -> Any:
        batch = args[0] if args else kwargs["input_batch"]
        real = runners and not kwargs.get("dummy_run") and not batch.req_ids[0].startswith("_")
        if real:  # else the engine's own warm-up
            shown = ShownAsV1(runners[0], batch, runners[0].block_tables.slot_mappings)
            injector.before(shown, shown.output, None)
        try:
            return propose(speculator, *args, **kwargs)
        finally:
            injector.building = None

    def faulty_begin(speculator: Any, *args: Any) -> None:
        begin(speculator, *args)
        change = injector.now(AT_FIRST)
        if change is not None:
            change(speculator)

    def faulty_generate(
        speculator: Any, bs: int, tokens: int, metadata: Any, slots: Any, *args: Any, **kwargs: Any
    ) -> Any:
        change = injector.now(AT_STEP)
        if change is not None:
            change(speculator, slots)
        return generate(speculator, bs, tokens, metadata, slots, *args, **kwargs)

    GPUModelRunner.prepare_attn, Speculator.propose = noting_prepare, faulty_propose
    Speculator.on_prefill_begin, Speculator._generate_draft = faulty_begin, faulty_generate


class V2DraftInjector(GpuInjector):
    """What is done to the V2 runner's drafter; `Injector` in ../faults.py says when."""

    def now(self, stage: str) -> Any:
        """Return what is to be done at a stage, once."""
        if self.building is None or self.building[0] != stage:
            return None
        _, change = self.building
        self.building = None
        return change

    def draft_position(
        self, runner: Any, fed: Any, row: int, name: str, prefix: int, at: int, extend: int
    ) -> dict | None:
        """Feed the draft's first forward positions that are one too high, which the next one goes on from."""

        def change(speculator: Any) -> None:
            speculator.input_buffers.positions[at : at + extend] += 1

        self.building = (AT_FIRST, change)
        return {"position": prefix}

    def draft_seq_lens(
        self, runner: Any, fed: Any, row: int, name: str, prefix: int, at: int, extend: int
    ) -> dict | None:
        """Tell the draft's attention of a token less than the request has."""

        def change(speculator: Any, _: Any) -> None:
            speculator.input_buffers.seq_lens[row] -= 1

        self.building = (AT_STEP, change)
        return {"position": prefix}

    def draft_slot_mapping(
        self, runner: Any, fed: Any, row: int, name: str, prefix: int, at: int, extend: int
    ) -> dict | None:
        """Write a drafted token to the slot behind its own."""

        def change(_: Any, slots: dict[str, Any]) -> None:
            next(iter(slots.values()))[row] += 1  # all layers of the group have the same

        self.building = (AT_STEP, change)
        return {"position": prefix}

    def draft_table(self, runner: Any, fed: Any, row: int, name: str, prefix: int, at: int, extend: int) -> dict | None:
        """Give the drafter a block table in which a block of the prefix is another request's; the next step has its own again."""
        table = runner.input_batch.block_table[0]
        entries = table.block_table.gpu
        others = [other for other in range(runner.input_batch.num_reqs) if other != row]
        foreign = [int(entries[other, 0]) for other in others]
        foreign = [block for block in foreign if block and block != int(entries[row, 0])]
        if prefix < table.block_size or not foreign:
            return None

        def change(_: Any) -> None:
            entries[row, 0] = foreign[0]

        self.building = (AT_FIRST, change)
        return {"position": 0}

    def draft_token(self, runner: Any, fed: Any, row: int, name: str, prefix: int, at: int, extend: int) -> dict | None:
        """Feed the draft another token than the target has sampled."""
        real, batch = runner.real, runner.batch
        if prefix + extend < int(real.req_states.prompt_len.np[batch.idx_mapping_np[row]]):
            return None

        def change(speculator: Any) -> None:
            last = speculator.last_token_indices[row]
            ids = speculator.input_buffers.input_ids
            ids[last] = (ids[last] + 7) % 600

        self.building = (AT_FIRST, change)
        return {"position": prefix, "count": extend}
