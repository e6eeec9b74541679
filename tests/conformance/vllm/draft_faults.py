"""Faults of a draft model's forwards, put into a running vLLM; `Injector` in faults.py says when.

Each is done to one request in one step: to what the drafter is given, to its first forward over the target's tokens, or to
the one after that, which feeds it the first token that it drafted.
"""

import dataclasses

AT_FIRST, AT_STEP, AT_SLOTS, AT_PROPOSAL, AT_STORE = "first", "step", "slots", "proposal", "store"


def install_draft_faults(injector, runner_class) -> None:
    """Have a fault put where the drafter is at its stage, once for each that is due."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

    propose_all, propose, mapping = runner_class.propose_draft_token_ids, Proposer.propose, Proposer._get_slot_mapping
    inputs, update = Proposer.build_model_inputs_first_pass, Proposer._update_positions_dependent_metadata

    def now(stage):
        """Return what is to be done at a stage, once."""
        if injector.building is None or injector.building[0] != stage:
            return None
        _, change = injector.building
        injector.building = None
        return change

    def faulty_propose_all(runner, output, *args, **kwargs):
        injector.before(runner, output, None)
        try:
            return propose_all(runner, output, *args, **kwargs)
        finally:
            injector.building = None

    def faulty_propose(proposer, *args, **kwargs):
        change = now(AT_PROPOSAL)
        return propose(proposer, *args, **(kwargs if change is None else {**kwargs, **change(kwargs)}))

    def faulty_mapping(proposer, *args, **kwargs):
        by_layer, change = mapping(proposer, *args, **kwargs), now(AT_SLOTS)
        return by_layer if change is None else change(by_layer)

    def faulty_inputs(proposer, *args, **kwargs):
        change = now(AT_FIRST)
        if change is not None:
            change(proposer)
        return inputs(proposer, *args, **kwargs)

    def faulty_update(proposer, positions, common, *args, **kwargs):
        found, change = update(proposer, positions, common, *args, **kwargs), now(AT_STEP)
        if change is not None:
            change(proposer, common)
        return found

    runner_class.propose_draft_token_ids, Proposer.propose = faulty_propose_all, faulty_propose
    Proposer._get_slot_mapping, Proposer.build_model_inputs_first_pass = faulty_mapping, faulty_inputs
    Proposer._update_positions_dependent_metadata = faulty_update
    if injector.fault == "draft_lost_write":
        _install_lost_writes(now)


def _install_lost_writes(now) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    store = CPUAttentionBackendImpl.do_kv_cache_update

    def faulty_store(impl, layer, key, value, kv_cache, slots):
        change = now(AT_STORE)
        return store(impl, layer, key, value, kv_cache, slots if change is None else change(slots))

    CPUAttentionBackendImpl.do_kv_cache_update = faulty_store


class DraftFaults:
    """What an injector does to a drafter."""

    building: tuple | None

    def draft_slot(self, runner, fed, row, name, prefix, at, extend):
        """Let the draft model write its first token of a request into a block of another's cached prefix."""
        batch = runner.input_batch
        table = batch.block_table[0]
        own = {int(block) for block in table.block_table.gpu[row, : table.num_blocks_per_row[row]]}
        for other in range(batch.num_reqs):
            block = int(table.block_table.gpu[other, 0])
            if other != row and batch.num_computed_tokens_cpu[other] >= table.block_size and block not in own:
                slot = block * table.block_size + self._rng.randrange(table.block_size)

                def change(by_layer, slot=slot):
                    changed = {name: slots.clone() for name, slots in by_layer.items()}
                    for slots in changed.values():
                        slots[at] = slot
                    return changed

                self.building = (AT_SLOTS, change)
                return {"group": 1, "slot": slot, "count": 1}
        return None

    def draft_position(self, runner, fed, row, name, prefix, at, extend):
        """Feed the draft's first forward positions that are one too high, which the next one goes on from."""

        def change(proposer):
            proposer.positions[at : at + extend] += 1

        self.building = (AT_FIRST, change)
        return {"position": prefix}

    def draft_step_position(self, runner, fed, row, name, prefix, at, extend):
        """Feed one drafted token at the position before its own, though its slot is right."""

        def change(proposer, common):
            proposer.positions[row] -= 1

        self.building = (AT_STEP, change)
        return {"position": prefix}

    def draft_seq_lens(self, runner, fed, row, name, prefix, at, extend):
        """Tell the draft's attention of a token less than the request has."""

        def change(proposer, common):
            common.seq_lens = common.seq_lens.clone()
            common.seq_lens[row] -= 1

        self.building = (AT_STEP, change)
        return {"position": prefix}

    def draft_slot_mapping(self, runner, fed, row, name, prefix, at, extend):
        """Write a drafted token to the slot behind its own."""

        def change(proposer, common):
            proposer._slot_mapping_buffer[row] += 1

        self.building = (AT_STEP, change)
        return {"position": prefix}

    def draft_table(self, runner, fed, row, name, prefix, at, extend):
        """Give the drafter a block table in which a block of the prefix is another request's."""
        table = runner.input_batch.block_table[0]
        others = [other for other in range(runner.input_batch.num_reqs) if other != row]
        blocks = [int(table.block_table.gpu[other, 0]) for other in others]
        foreign = [block for block in blocks if block and block != int(table.block_table.gpu[row, 0])]
        if prefix < table.block_size or not foreign:
            return None

        def change(given):
            common = given["common_attn_metadata"]
            blocks = common.block_table_tensor.clone()
            blocks[row, 0] = foreign[0]
            return {"common_attn_metadata": dataclasses.replace(common, block_table_tensor=blocks)}

        self.building = (AT_PROPOSAL, change)
        return {"position": 0}

    def draft_token(self, runner, fed, row, name, prefix, at, extend):
        """Feed the draft another token than the target has sampled."""
        if prefix + extend < int(runner.input_batch.num_prompt_tokens[row]):
            return None

        def change(given):
            tokens = given["next_token_ids"].clone()
            tokens[row] = (tokens[row] + 7) % 600
            return {"next_token_ids": tokens}

        self.building = (AT_PROPOSAL, change)
        return {"position": prefix, "count": extend}

    def draft_lost_write(self, runner, fed, row, name, prefix, at, extend):
        """Store nothing of the first token that the draft's first forward adds to a request, but report that it did."""

        def change(slots):
            slots = slots.clone()
            slots[at] = -1
            return slots

        self.building = (AT_STORE, change)
        return {"position": prefix}
