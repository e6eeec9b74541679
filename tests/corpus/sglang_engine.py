"""Runs SGLang for the corpus: with one bug, or with none; every run is a process forked from one that has imported it all.

python sglang_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import json
import os
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFORMANCE = HERE.parent / "conformance" / "sglang"
sys.path.insert(0, str(HERE))

from sglang_setups import SETUPS, TELLING  # noqa: E402


def ask_for_flushes() -> None:
    """Ask the scheduler for a flush behind every third step, which an engine that is not idle refuses."""
    from sglang.srt.managers.scheduler import Scheduler

    process, steps = Scheduler.process_batch_result, [0]

    def then_flush(self, *args, **kwargs) -> None:
        process(self, *args, **kwargs)
        steps[0] += 1
        if steps[0] % 3 == 0:
            self.flush_cache()

    Scheduler.process_batch_result = then_flush


def abort_between_chunks() -> None:
    """Abort the first prompt, and the fourth, that has computed two of its chunks and has more to come."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.scheduler import Scheduler

    process, seen = Scheduler.process_batch_result, []

    def then_abort(self, *args, **kwargs) -> None:
        process(self, *args, **kwargs)
        chunked = self.chunked_req
        if chunked is not None and chunked.rid not in seen and chunked.kv.kv_committed_len >= 64:
            seen.append(chunked.rid)
            if len(seen) in (1, 4):
                self.abort_request(AbortReq(rid=chunked.rid))

    Scheduler.process_batch_result = then_abort


def close_while_it_decodes() -> None:
    """Close the second session when its second turn has answered four tokens, which an engine puts off until the turn has ended."""
    from sglang.srt.managers.io_struct import CloseSessionReqInput
    from sglang.srt.managers.scheduler import Scheduler

    process = Scheduler.process_batch_result

    def then_close(self, *args, **kwargs) -> None:
        process(self, *args, **kwargs)
        session = self.session_controller.get("second")
        if session is not None and session.req_nodes and not session.close_on_finish:
            for req in self.running_batch.reqs:
                if req.session is session and len(req.output_ids) == 4:
                    self.session_controller.close(CloseSessionReqInput(session_id="second"))

    Scheduler.process_batch_result = then_close


def abort_while_it_decodes() -> None:
    """Abort the second session's second turn when it has answered four tokens."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.scheduler import Scheduler

    process, turns = Scheduler.process_batch_result, []

    def then_abort(self, *args, **kwargs) -> None:
        process(self, *args, **kwargs)
        session = self.session_controller.get("second")
        for req in self.running_batch.reqs if session is not None else ():
            if req.session is session and req.rid not in turns:
                turns.append(req.rid)
            if req.session is session and len(turns) == 2 and len(req.output_ids) == 4:
                self.abort_request(AbortReq(rid=req.rid))

    Scheduler.process_batch_result = then_abort


def abort_while_others_wait() -> None:
    """Abort a request that has answered five tokens and leaves others behind, twice, while more wait for room."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.scheduler import Scheduler

    process, seen = Scheduler.process_batch_result, []

    def then_abort(self, *args, **kwargs) -> None:
        process(self, *args, **kwargs)
        running = [req for req in self.running_batch.reqs if len(req.output_ids) >= 5 and not req.finished()]
        if len(running) > 1 and self.waiting_queue and len(seen) < 2 and running[0].rid not in seen:
            seen.append(running[0].rid)
            self.abort_request(AbortReq(rid=running[0].rid))

    Scheduler.process_batch_result = then_abort


def let_them_come_apart() -> None:
    """Let requests that are asked together come to the scheduler one behind another, every fifth step, or when it has none."""
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler

    process, held, steps = Scheduler.process_input_requests, [], [0]

    def then_hold(self, received) -> None:
        others = []
        for one in received or ():
            if isinstance(one, BatchTokenizedGenerateReqInput):
                held.extend(one)
            else:
                (held if isinstance(one, TokenizedGenerateReqInput) else others).append(one)
        steps[0] += not self.running_batch.is_empty()
        if held and (steps[0] >= 5 or (self.running_batch.is_empty() and not self.waiting_queue)):
            others.append(held.pop(0))
            steps[0] = 0
        process(self, others)

    Scheduler.process_input_requests = then_hold


def flush_behind_a_fetch() -> None:
    """Abort the first prompt that is alone and for which pages are being fetched, and flush when these are to be released."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    progress, following, fetched, done = (
        UnifiedRadixCache.check_prefetch_progress,
        Scheduler.get_next_batch_to_run,
        [],
        [],
    )

    def then_wait(self, request) -> bool:
        if not fetched and self.ongoing_prefetch.get(request) and len(self.ongoing_prefetch) == 1:
            if self.ongoing_prefetch[request].operation.host_indices is None:
                return False
            fetched.append(request.rid)
        return request.rid not in fetched and progress(self, request)

    def then_flush(self, *args, **kwargs):
        batch = following(self, *args, **kwargs)
        if fetched and not done:
            done.append(self.abort_request(AbortReq(rid=fetched[0])))
        elif done == [None] and self.tree_cache.cache_controller.host_mem_release_queue.qsize():
            done.append(self.flush_cache())
        return batch

    UnifiedRadixCache.check_prefetch_progress, Scheduler.get_next_batch_to_run = then_wait, then_flush


ABORTED_TALK = (  # how many tokens are said and answered, and in which session
    ((30, 10, "first"), (26, 8, "second"), (20, 9)),
    ((10, 30, "second"), (9, 12, "first"), (25, 12)),
    ((20, 10, "second"), (12, 8, "first"), (18, 8)),
    ((11, 9, "second"), (31, 10)),
)


def tell_layers_apart() -> None:
    """Give each layer weights of its own; weights that are made up are the same for all layers."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    load = ModelRunner.load_model

    def then_scale(self, *args, **kwargs) -> None:
        load(self, *args, **kwargs)
        for number, layer in enumerate(self.model.model.layers):
            for weight in layer.parameters():
                weight.data.mul_(1 + number)

    ModelRunner.load_model = then_scale


def let_attention_be_seen() -> None:
    """Have weights made up that are large enough for what attention reads to be seen in what is answered."""
    from sglang.srt.model_loader.loader import DummyModelLoader

    load = DummyModelLoader.load_model

    def then_enlarge(self, *args, **kwargs):
        model = load(self, *args, **kwargs)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.data.fill_(1.0)
            elif weight.ndim > 1 and "embed" not in name:
                weight.data.mul_(120.0)
        return model

    DummyModelLoader.load_model = then_enlarge


def enlarge_states() -> None:
    """Make what goes into the states of a model's convolutions, and what comes of them, large enough to be seen."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    load = ModelRunner.load_model

    def then_enlarge(self, *args, **kwargs) -> None:
        load(self, *args, **kwargs)
        for name, weight in self.model.named_parameters():
            if "operator_norm" in name or name.endswith(("conv.weight", "conv_weight")):
                weight.data.mul_(1e5 if "norm" in name else 1e3)

    ModelRunner.load_model = then_enlarge


def ask_with_keys(engine, batch: list[list[int]], sampling: list[dict], number: int) -> list[dict]:
    """Return the answers to prompts of two tenants, each of which has a key of the caller's and a salt."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    keys = [(("app", "12"), ("app1", "2"))[(i + number) % 2] for i in range(len(batch))]
    asked = GenerateReqInput(
        input_ids=batch,
        sampling_params=sampling,
        extra_key=[key for key, _ in keys],
        cache_salt=[salt for _, salt in keys],
    )
    return engine.loop.run_until_complete(engine.tokenizer_manager.generate_request(asked, None).__anext__())


def ask_with_embeddings(engine, batch: list[list[int]], sampling: list[dict], number: int) -> list[dict]:
    """Return the answers to prompts of which four tokens have embeddings of the caller's, or to those without, if asked again."""
    import torch
    from sglang.srt.managers.embed_types import PositionalEmbeds
    from sglang.srt.managers.io_struct import GenerateReqInput

    dice = torch.Generator().manual_seed(17)
    put = [PositionalEmbeds(embeds=torch.randn(4, 64, generator=dice), positions=[6, 7, 9, 12]) for _ in batch]
    asked = GenerateReqInput(
        input_ids=batch, sampling_params=sampling, positional_embed_overrides=None if number else put
    )
    return engine.loop.run_until_complete(engine.tokenizer_manager.generate_request(asked, None).__anext__())


def ask_with_pictures(engine, batch: list[list[int]], sampling: list[dict], number: int) -> list[dict]:
    """Return the answers to prompts of which each has a picture in it, as four embeddings, the first number of which names it.

    Those that are asked again have other pictures by the same names, but for the third one's.
    """
    import torch
    from sglang.srt.managers.embed_types import PositionalEmbeds
    from sglang.srt.managers.io_struct import GenerateReqInput

    put = []
    for i, _ in enumerate(batch):
        which, name = ((0, 1), (1, 2), (2, 3), (3, 1), (4, 4), (1, 2), (5, 3))[i + 3 * number]
        picture = torch.randn(4, 64, generator=torch.Generator().manual_seed(which))
        picture[0, 0] = name / 4
        put.append(PositionalEmbeds(embeds=picture, positions=[6, 7, 8, 9]))
    asked = GenerateReqInput(input_ids=batch, sampling_params=sampling, positional_embed_overrides=put)
    return engine.loop.run_until_complete(engine.tokenizer_manager.generate_request(asked, None).__anext__())


def ask_by_name(engine, batch: list[list[int]], sampling: list[dict], number: int) -> list[dict]:
    """Return the answers of adapters, and then those of the base model for callers whose own keys are called as the adapters are."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    names = [("first", "second", "own")[i % 3] for i in range(len(batch))]
    keys = {"extra_key": names} if number else {"lora_path": [None if name == "own" else name for name in names]}
    asked = GenerateReqInput(input_ids=batch, sampling_params=sampling, **keys)
    return engine.loop.run_until_complete(engine.tokenizer_manager.generate_request(asked, None).__anext__())


def talk(engine, tokens, rounds=()) -> list[list[int]]:
    """Return the answers of two sessions, whose turns go on where the last one ended, and of prompts beside them.

    The first session asks for more than there are slots, too, and is told that it cannot have it.
    """
    import asyncio

    for name in ("first", "second"):
        engine.open_session(capacity_of_str_len=1000, session_id=name, streaming=True)

    async def ask(count: int, new: int, session: str = "") -> list[int]:
        sampling = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        params = {"id": session, "rid": None, "offset": None, "replace": None} if session else None
        try:
            answer = await engine.async_generate(
                input_ids=tokens(count), sampling_params=sampling, session_params=params
            )
        except ValueError:  # there is no room for it
            return []
        return answer["output_ids"]

    async def at_once(*asked) -> list[list[int]]:
        return list(await asyncio.gather(*(ask(*one) for one in asked)))

    return [
        answer
        for asked in rounds
        or (
            ((30, 10, "first"), (26, 8, "second"), (20, 9)),
            ((9, 10, "first"), (10, 30, "second"), (25, 12), (35, 8), (28, 10), (22, 14)),
            ((200, 10, "first"),),
            ((7, 12, "first"), (31, 10)),
        )
        for answer in engine.loop.run_until_complete(at_once(*asked))
    ]


def unpinned(create):
    """Return a function of torch's that does not pin what it makes."""

    def created(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return create(*args, **kwargs)

    return created


def lose_files_now_and_then(every: int) -> None:
    """Let each so-and-so-many-th file that is read be one that is no longer there."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    get, asked = HiCacheFile.get, [0]

    def then_get(self, *args, **kwargs):
        asked[0] += 1
        return get(self, *args, **kwargs) if asked[0] % every else None

    HiCacheFile.get = then_get


def adapter_of_outputs() -> str:
    """Return the folder of a LoRA adapter that touches nothing but what the attention puts out."""
    import torch
    from clients import adapter_folder
    from safetensors.torch import save_file

    folder = Path(adapter_folder("first")).with_name("outputs")
    if not (folder / "adapter_model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        said = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["o_proj"], "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(said))
        config = json.loads((CONFORMANCE / "models" / "llama" / "config.json").read_text())
        hidden, inner = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
        dice = torch.Generator().manual_seed(7)
        layers = {
            f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{part}.weight": torch.randn(
                (8, inner) if part == "A" else (hidden, 8), generator=dice
            )
            for layer in range(config["num_hidden_layers"])
            for part in "AB"
        }
        save_file(layers, folder / "adapter_model.safetensors")
    return str(folder)


def options_of(setup: str) -> dict:
    """Return what the engine is given for adapters, or for copies in the host's memory; put in place what they need."""
    if setup.startswith("llama-session"):
        return {"enable_streaming_session": True}
    if setup.startswith("llama-lora") or setup.endswith("storage"):
        import torch

        for name in ("empty", "zeros", "tensor", "arange"):  # there is no pinned memory without a device
            setattr(torch, name, unpinned(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    if setup.startswith("llama-lora"):
        from request_kinds import LORA, load_adapters

        load_adapters()
        if "swapped" in setup:  # more adapters than buffers, which do not touch the same modules
            paths = [*LORA["lora_paths"], f"outputs={adapter_of_outputs()}"]
            modules = [*LORA["lora_target_modules"], "o_proj"]
            return {**LORA, "lora_paths": paths, "lora_target_modules": modules, "max_loras_per_batch": 2}
        return LORA
    if setup.startswith("llama-host"):
        from host_cache import stand_in

        stand_in()
        layout = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
        return {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 4.0,
            "hicache_write_policy": "write_back",
            **layout,
            **(kept_in_files() if setup.endswith("storage") else {}),
            **({"hicache_ratio": 1.2} if "lossy" in setup or "halves" in setup else {}),
        }
    return {}


def kept_in_files() -> dict:
    """Return what the engine is given to keep in files what it has in the host's memory, and to wait for what it reads there.

    The tree is the one in Python.
    """
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
    return {
        "hicache_ratio": 3.0,
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "file",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 4}),
    }


def fired_in(forward: list[int]):
    """Return what a patch calls before the first forward that reads the damage: it leaves a mark in the trace."""
    from kvcanary.recorder.engines.sglang.attachment import SglangAttachment

    made: list = []
    init = SglangAttachment.__init__

    def remember(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    SglangAttachment.__init__ = remember

    def fired() -> None:
        if forward:
            return
        for attachment in made:
            for recorder in attachment.recorders():
                forward.append(int(recorder.next_forward))
                recorder.mark("real bug", {"forward": forward[0]})

    return fired


def generate(setup: str, folder: Path) -> None:
    """Start the engine, let it answer seeded random prompts, some of which share a prefix, and shut it down."""
    from engine import CPU_ENGINE, MODELS, retract_now_and_then
    from request_kinds import use_plain_convolutions
    from sglang.srt.entrypoints.engine import Engine

    chosen = SETUPS[setup]
    if chosen.retracts:
        retract_now_and_then()
    if chosen.model == "lfm2":
        use_plain_convolutions()
    if (
        setup == "hybrid-turns"
    ):  # without a bug this attention needs slots that its sliding pool does not have, and ends
        os.environ["SGLANG_SWA_EVICTION_INTERVAL"] = "4"
    if setup in (
        "hybrid-page4-inside",
        "hybrid-page2-ring",
        "hybrid-page4-emptied",
    ):  # what lies in front of a window stays for those who leave a prompt there
        os.environ["SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS"] = "0"
    if "uneven" in setup:
        tell_layers_apart()
    if setup in (
        "recurrent-ends",
        "recurrent-few-slots",
        "recurrent-ubatches",
        "recurrent-joined",
        "recurrent-remapped",
        "recurrent-blocks",
    ):
        enlarge_states()
    if setup in TELLING:
        let_attention_be_seen()
    if setup == "llama-flush":
        ask_for_flushes()
    if setup in ("llama-abort", "llama-page4-abort"):
        abort_between_chunks()
    if setup == "llama-page2-abort":
        abort_while_others_wait()
    if "lossy" in setup:
        lose_files_now_and_then(19 if "twice" in setup else 5)
    if "flushed" in setup:
        flush_behind_a_fetch()
    if setup == "llama-lora-page4-apart":
        let_them_come_apart()
    if setup == "llama-session":
        close_while_it_decodes()
    if setup == "llama-session-abort":
        abort_while_it_decodes()
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder.resolve() / "stored")
    os.chdir(MODELS.parent)  # the trace keeps the model's name as it is given here
    engine = Engine(
        model_path=f"models/{chosen.model}",
        **{**CPU_ENGINE, "max_running_requests": chosen.most, "log_level": "warning", "mem_fraction_static": 0.3},
        disable_overlap_schedule=not chosen.overlap,
        disable_radix_cache=setup.endswith("no-tree"),
        enable_mixed_chunk=setup.endswith("mixed"),
        max_mamba_cache_size=8
        if setup in ("recurrent-retract", "recurrent-few-slots", "recurrent-handed-on")
        else 12
        if setup in ("recurrent-padded", "recurrent-resumed-retract-no-tree")
        else None,
        page_size=chosen.page,
        max_total_tokens=chosen.slots,
        kv_cache_dtype="bfloat16" if setup.endswith("bf16") else "auto",
        random_seed=1,
        **options_of(setup),
    )
    rng = random.Random(5)
    asked = chosen.ask(rng)
    tokens, prompts, again = asked.tokens, asked.prompts, asked.again
    rounds = ABORTED_TALK if setup == "llama-session-abort" else ()
    outputs = talk(engine, tokens, rounds) if setup.startswith("llama-session") else []
    for number, batch in enumerate(
        (prompts[:2], prompts[2:4], prompts[:1], prompts[4:6], prompts[6:], again[:1], again[1:])
        if "flushed" in setup
        else [[prompt] for prompt in prompts] * 3
        if "twice" in setup
        else (prompts[:2], prompts[2:4], prompts[4:]) * 2
        if "again" in setup
        else (prompts[:2], prompts[2:4], [], prompts[4:], [])
        if setup.startswith("llama-host")
        else ()
        if setup.startswith("llama-session")
        else (prompts[:1], prompts[1:], again[:1], again[1:3], again[3:])
        if setup == "recurrent-branches"
        else (prompts, again)
    ):
        if setup == "llama-host-parts" and number in (2, 3):  # goes on inside a prompt that has left, before others
            batch = [prompts[0][:20] + tokens(6)] if number == 2 else [*prompts[4:], tokens(40)]
        if setup.startswith("llama-host") and not batch:  # goes on behind an answer, when others have taken its slots
            batch = [
                prompts[i] + outputs[i] + tokens(4)
                for i in ((0,) if number == 2 or setup == "llama-host-parts" else (1, 2))
            ]
        if number and setup == "recurrent-weights":
            import torch

            engine.begin_weight_update()
            names = [f"model.layers.{layer}.operator_norm.weight" for layer in range(4)]
            done, said = engine.update_weights_from_tensor([(name, torch.full((64,), 0.7)) for name in names])
            engine.end_weight_update()
            assert done, said
        if number and setup == "llama-overlap-page4-weights":
            import torch

            engine.begin_weight_update()
            names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)]
            done, said = engine.update_weights_from_tensor([(name, torch.full((64,), 0.8)) for name in names])
            engine.end_weight_update()
            assert done, said
        if number and setup == "hybrid-page4-weights":
            import torch

            engine.begin_weight_update()
            names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(4)]
            done, said = engine.update_weights_from_tensor([(name, torch.full((64,), 1.3)) for name in names])
            engine.end_weight_update()
            assert done, said
        if number == 2 and setup == "llama-host-weights-storage":
            import torch

            engine.begin_weight_update()
            names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)]
            done, said = engine.update_weights_from_tensor([(name, torch.full((64,), 1.2)) for name in names])
            engine.end_weight_update()
            assert done, said
            engine.loop.run_until_complete(engine.tokenizer_manager.clear_hicache_storage())
        if number and setup == "qwen3-page8-slept":
            assert engine.flush_cache().success
        if number and setup == "llama-weights":
            import torch

            engine.begin_weight_update()
            done, said = engine.update_weights_from_tensor([("model.norm.weight", torch.full((64,), 0.5))])
            engine.end_weight_update()
            assert done, said
        if number and setup == "hybrid-turns":  # goes on inside an answer that was longer than the window
            batch = [prompts[0] + outputs[0][:24] + tokens(5), prompts[3] + outputs[3][:20] + tokens(7)]
        if number and setup == "llama-thinks":  # goes on behind answers, without what was thought first
            batch = [prompts[i] + outputs[i][4:] + tokens(6) for i in (0, 3, 1)]
        if number and setup == "llama-turns-whole":
            batch = [prompts[i] + outputs[i] + tokens(6) for i in (2, 0, 3)]
        if number and setup == "llama-turns-ended":
            batch = [prompts[i] + outputs[i] + tokens(5) for i in (1, 3, 0)]
        sampling = [{"max_new_tokens": rng.randrange(8, 20), "temperature": 0, "ignore_eos": True} for _ in batch]
        if setup == "hybrid-turns":
            sampling = [{**one, "max_new_tokens": 40} for one in sampling]
        if number and setup == "llama-once-more":
            sampling[0]["max_new_tokens"] = 40
        salts = {}
        if setup == "llama-lora":
            if number:  # another adapter by the name of one that was unloaded
                from clients import adapter_folder

                engine.unload_lora_adapter("second")
                engine.load_lora_adapter("second", adapter_folder("third"))
            salts["lora_path"] = [("second", "first", None)[i % 3] for i in range(len(batch))]
        if setup == "llama-lora-page8-renewed":
            if number:  # the first one is trained further, and loaded again by its name
                from clients import adapter_folder

                engine.unload_lora_adapter("first")
                engine.load_lora_adapter("first", adapter_folder("further"))
            salts["lora_path"] = [("first", "second", "first")[i % 3] for i in range(len(batch))]
        if "swapped" in setup:
            salts["lora_path"] = [("outputs", "first", "second")[(i // 2 + i % 2) % 3] for i in range(len(batch))]
        if setup == "llama-lora-page4":  # neighbours have different ones, and others of the batch have the same again
            salts["lora_path"] = [("first", "second", "first", None, "second")[i % 5] for i in range(len(batch))]
        if setup == "llama-lora-page2-tenants":
            salts["lora_path"] = [("first", None, "second", "second")[i % 4] for i in range(len(batch))]
        if setup == "llama-lora-page4-apart":
            salts["lora_path"] = [("first", "second", None, "first")[(i + number) % 4] for i in range(len(batch))]
        if setup == "llama-lora-page8-beside":  # beside each adapter there are requests of the base model
            base = (("first", None, "second", None), (None, "second", "first", None))[number]
            salts["lora_path"] = [base[i % 4] for i in range(len(batch))]
        if setup == "llama-host-storage":  # another tenant goes on behind what the first one has asked
            salts["cache_salt"] = [f"tenant {number // 4}"] * len(batch)
        if setup == "llama-salts":
            salts["cache_salt"] = [f"tenant {i % 2 + number}" for i in range(len(batch))]
        if setup == "llama-beams":  # every other has three beams
            sampling = [{**one, "beam_width": 3} if i % 2 else one for i, one in enumerate(sampling)]
        if setup == "llama-lora-page16-named":
            outputs += [o["output_ids"] for o in ask_by_name(engine, batch, sampling, number)]
            continue
        if setup == "llama-page2-overrides":
            outputs += [o["output_ids"] for o in ask_with_embeddings(engine, batch, sampling, number)]
            continue
        if setup == "llama-page4-pictures":
            outputs += [o["output_ids"] for o in ask_with_pictures(engine, batch, sampling, number)]
            continue
        if setup == "llama-keys":
            outputs += [o["output_ids"] for o in ask_with_keys(engine, batch, sampling, number)]
            continue
        outputs += [o["output_ids"] for o in engine.generate(input_ids=batch, sampling_params=sampling, **salts)]
    (folder / "tokens.json").write_text(json.dumps(outputs))
    engine.shutdown()


def run(name: str, folder: Path) -> int:
    """Run one bug, or a setup without any; return the exit status."""
    from bugs import load
    from engine import ENVIRONMENT, forked

    clean = name.startswith("clean:")

    def go() -> None:
        from sglang.srt.managers.scheduler_components import invariant_checker

        # An engine that finds its own pool wrong ends at once; one that does not look goes on, as in production.
        invariant_checker.raise_error_or_warn = lambda *args, **kwargs: None
        fired = fired_in([])
        if not clean:
            load("sglang")[name].patch(fired)
        generate(name.removeprefix("clean:") if clean else load("sglang")[name].setup, folder)

    return forked(folder, {**ENVIRONMENT, "KVCANARY_TRACE": str(folder / "traces")}, go, 480.0)


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(CONFORMANCE)]
    from engine import ENVIRONMENT, import_engine

    ENVIRONMENT = {k: v for k, v in ENVIRONMENT.items() if k != "SGLANG_STANDIN_CANARY"}
    wanted = {
        **ENVIRONMENT,
        "KVCANARY_COMPRESSION": "zstd",
        "KVCANARY_FLUSH_INTERVAL_MS": "3600000",
        "PYTHONPATH": os.pathsep.join(
            [str(CONFORMANCE / "standin"), str(HERE), str(CONFORMANCE), os.environ.get("PYTHONPATH", "")]
        ),
    }
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    import_engine()
    for one in sys.argv[2:]:
        place = Path(sys.argv[1]) / one.replace(":", "-")
        import shutil

        shutil.rmtree(place, ignore_errors=True)
        print(one, run(one, place), flush=True)
