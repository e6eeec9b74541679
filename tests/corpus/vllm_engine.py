"""Runs vLLM for the corpus: with one bug, or with none; every run is a process forked from one that has imported it all.

python vllm_engine.py FOLDER NAME...        # NAME: a bug's, or clean:SETUP
"""

import json
import os
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

HERE = Path(__file__).resolve().parent
CONFORMANCE = HERE.parent / "conformance" / "vllm"
sys.path[:0] = [str(HERE), str(CONFORMANCE)]
sys.path.append(str(HERE.parent / "conformance"))

from forking import fork, wait_for  # noqa: E402
from vllm_setups import PICTURE, SETUPS, TELLING, Asked  # noqa: E402


def fired_in(forward: list[int]):
    """Return what a patch calls before the first forward that reads the damage: it leaves a mark in the trace."""

    def fired() -> None:
        from kvcanary.recorder.engines.vllm import hooks

        if forward:
            return
        for attachment in hooks.attachments:
            for recording in attachment.recordings.values():
                if recording is not None:
                    forward.append(int(recording.recorder.next_forward))
                    recording.recorder.mark("real bug", {"forward": forward[0]})

    return fired


def generate(setup: str, folder: Path, more: Mapping[str, Any]) -> None:
    """Start the engine, with `more` arguments, let it answer seeded random prompts, some of which share a prefix, and shut it down."""
    from vllm import LLM, SamplingParams

    chosen = SETUPS[setup]
    model, arguments = chosen.model, dict(chosen.arguments)
    if "model" in arguments.get("speculative_config", {}):
        arguments["speculative_config"] = {
            **arguments["speculative_config"],
            "model": str(CONFORMANCE / "models" / "eagle"),
        }
    if "kv_transfer_config" in arguments:
        from vllm.config import KVTransferConfig

        arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
    if model == "mrope":
        import mrope

        mrope.register()
    if setup in TELLING:
        let_attention_be_seen()
    defaults = {
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 6,
        "async_scheduling": False,
        "block_size": 32,
        "dtype": "float32",
    }
    llm = LLM(
        model=str(CONFORMANCE / "models" / model),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        seed=1,
        enable_prefix_caching=True,
        **{**defaults, **arguments, **more},
    )
    if (
        setup == "recurrent-tails"
    ):  # weights that are made up are so small that no state would be seen in what comes of it
        llm.apply_model(enlarge_states)
    rng = random.Random(5)
    batches = chosen.batches(Asked(rng))
    lora: list = [None] * len(batches)
    if setup == "llama-lora":
        lora = [adapter(folder, 1), adapter(folder, 2)]
    if setup == "llama-lora-mixed":  # one after the other in each batch
        both = adapter(folder, 1), adapter(folder, 2, "other tenant")
        lora = [[both[i % 2] for i in range(len(batch))] for batch in batches]
    if (
        setup == "llama-lora-salts"
    ):  # and then the base model, some of whose requests have the adapter's name as their salt
        lora = [adapter(folder, 1, "tenant 1"), None]
    if setup == "llama-lora-tight":
        both = adapter(folder, 1, "tenant 1"), None, adapter(folder, 2, "tenant 2")
        lora = [[both[(i + number) % 3] for i in range(len(batch))] for number, batch in enumerate(batches)]
    if setup == "llama-lora-chunks":
        both = adapter(folder, 1, "tenant 1"), adapter(folder, 2, "tenant 2"), None
        lora = [[both[(i + number) % 3] for i in range(len(batch))] for number, batch in enumerate(batches)]
    if setup == "llama-lora-prompts":
        both = adapter(folder, 1, "tenant 1"), adapter(folder, 2, "tenant 2"), None
        lora = [[both[(2 * i + number) % 3] for i in range(len(batch))] for number, batch in enumerate(batches)]
    if setup == "llama-lora-guesses":
        both = None, adapter(folder, 1, "tenant 1"), adapter(folder, 2, "tenant 2")
        lora = [[both[(i + 1 + number) % 3] for i in range(len(batch))] for number, batch in enumerate(batches)]
    if setup == "llama-lora-cold":  # the third tenant takes the first one's place, who comes again behind it
        turns = [adapter(folder, i, f"tenant {i}") for i in (1, 2, 3)]
        lora = [[turns[0], turns[1]], [turns[2], turns[1]], [turns[0], turns[0], turns[2]]]
    if setup in ("llama-lora-loads", "llama-lora-shares"):
        both = adapter(folder, 1, "tenant 1"), adapter(folder, 2, "tenant 2")
        lora = [both[0], both[1], both[0]]
    if setup == "llama-lora-reload":  # of other weights behind the first batch
        lora = [adapter(folder, 1)] * len(batches)
    outputs = []
    for number, batch in enumerate(batches):
        if number == 1 and setup == "llama-lora-reload":
            llm.llm_engine.remove_lora(1)
            adapter(folder, 1, seed=2)
            llm.reset_prefix_cache()
        elif number == 1 and setup == "llama-loads-weights":
            import torch

            weights = (
                "model.layers.0.input_layernorm.weight",
                torch.randn(96, generator=torch.Generator().manual_seed(7)),
            )
            llm.apply_model(lambda model, new=weights: model.load_weights([new]))
            llm.reset_prefix_cache(reset_connector=True)
        elif number == 1 and setup == "hybrid-weights":
            import torch

            size = llm.llm_engine.model_config.get_hidden_size()
            drawn = torch.randn(size, generator=torch.Generator().manual_seed(11))
            weights = ("model.layers.0.input_layernorm.weight", drawn)
            llm.apply_model(lambda model, new=weights: model.load_weights([new]) and None)
            llm.reset_prefix_cache()
        elif number == 1 and setup == "qwen-synced":
            import torch

            drawn = torch.randn(64, generator=torch.Generator().manual_seed(13))
            weights = ("model.layers.0.input_layernorm.weight", drawn)
            llm.apply_model(lambda model, new=weights: model.load_weights([new]) and None)
            llm.reset_prefix_cache()
        elif number and setup == "recurrent-refits":  # each time with other weights
            import torch

            drawn = torch.randn(128, generator=torch.Generator().manual_seed(16 + number))
            weights = ("model.layers.0.operator_norm.weight", drawn)
            llm.apply_model(lambda model, new=weights: model.load_weights([new]) and None)
            llm.reset_prefix_cache()
        elif number == 1 and setup == "llama-sleeps":  # what it wakes up with is new memory
            llm.reset_prefix_cache()
            llm.collective_rpc(lambda worker: [cache.zero_() for cache in worker.model_runner.kv_caches] and None)
        elif number and "kv_transfer_config" in arguments:
            llm.reset_prefix_cache()
        sampling = [
            SamplingParams(
                max_tokens=rng.randrange(8, 30) + chosen.more, temperature=0, ignore_eos=True, detokenize=False
            )
            for _ in batch
        ]
        given = [{"prompt_token_ids": prompt} for prompt in batch]
        if setup.endswith("salts") and (number or setup != "llama-lora-salts"):
            given = [{**one, "cache_salt": f"tenant {i % 2 + number}"} for i, one in enumerate(given)]
        if setup == "llama-embeds":  # all of them different
            import torch

            drawn = torch.Generator().manual_seed(number + 1)
            given = [{"prompt_embeds": torch.randn(len(prompt), 96, generator=drawn)} for prompt in batch]
        if setup == "qwen-embeds-modes":  # those of the second batch are the others turned around
            import torch

            size, way = llm.llm_engine.model_config.get_hidden_size(), -1 if number == 1 else 1
            drawn = torch.randn(640, size, generator=torch.Generator().manual_seed(19))
            given = [{"prompt_embeds": way * drawn[prompt]} for prompt in batch]
        if setup in ("qwen-embeds-pictures", "qwen-embeds-albums"):  # of tokens from 600 on each is a part of a picture
            import torch

            size = llm.llm_engine.model_config.get_hidden_size()
            drawn = torch.randn(640, size, generator=torch.Generator().manual_seed(23))
            drawn[600:, -1] = PICTURE
            given = [{"prompt_embeds": drawn[prompt]} for prompt in batch]
        if setup == "llama-streaming-turns" and number == 1:  # goes on behind the first turns, their last tokens too
            given = [
                {"prompt_token_ids": asked + answer[: 64 - len(asked)] + prompt}
                for asked, answer, prompt in zip(batches[0], outputs, batch, strict=True)
            ]
        if setup == "llama-streaming-turns":
            outputs += with_turns(llm, number, given, sampling)
            continue
        if setup == "llama-aborts":
            outputs += with_aborts(llm, number, given, sampling)
            continue
        if setup in ("llama-loads-aborts", "qwen-loads-leaves"):
            outputs += with_an_abort_while_it_loads(llm, number, given, sampling)
            continue
        if setup in ("recurrent-cancels", "delta-cancels"):
            outputs += with_one_that_leaves(llm, number, given, sampling, (0, 2) if "recurrent" in setup else (1, 2))
            continue
        if setup == "llama-lora-added":
            outputs += with_added_adapters(llm, number, given, sampling, folder)
            continue
        if setup == "llama-loads-turns" and number == 1:  # of the first answers there are many tokens in the question
            given = [
                {"prompt_token_ids": asked + answer[:42] + prompt}
                for asked, answer, prompt in zip(batches[0], outputs, batch, strict=True)
            ]
        if setup in ("qwen-loads-ends", "qwen-budgets") and number == 1:
            given = [
                {"prompt_token_ids": asked + answer + prompt}
                for asked, answer, prompt in zip(batches[0], outputs, batch, strict=True)
            ]
        if setup == "delta-turns" and number == 1:  # behind a part of the first answer, and behind all of the second
            given = [
                {"prompt_token_ids": asked + answer[:end] + prompt}
                for asked, answer, prompt, end in zip(batches[0], outputs, batch, (31, None), strict=True)
            ]
        if setup == "qwen-loads-ends" and number == 0:  # the first two end with a block, the third in the middle of one
            for one, count in zip(sampling, (27, 46, 24), strict=True):
                one.max_tokens = count
        if setup in ("llama-eagle-brim", "llama-loads-turns"):
            for one, question in zip(sampling, given, strict=True):
                one.max_tokens = min(26 if "brim" in setup else 46, 256 - len(question["prompt_token_ids"]))
        if setup == "llama-recycles" and number == 0:  # the first one is there until the others are done
            sampling[0].max_tokens = 130
        if setup == "qwen-forks":  # answers to the same prompt differ
            for place, one in enumerate(sampling):
                one.temperature, one.seed = 0.02, place
        if setup == "llama-cohorts":  # the first is done before the second, and so on
            for place, one in enumerate(sampling):
                one.max_tokens = 9 + 8 * place
        if setup in ("qwen-suspends", "llama-recomputes"):
            if setup == "qwen-suspends" and number == 0:
                for place, one in enumerate(sampling):
                    one.max_tokens = 45 if place else 5
            outputs += with_all_put_back(llm, number, given, sampling, (0, 11) if "qwen" in setup else (1, 3))
            continue
        if setup == "llama-streaming":
            outputs += with_further_input(llm, number, given, sampling)
            continue
        if setup == "llama-weights-running":
            outputs += with_new_weights(llm, number, given, sampling)
            continue
        outputs += [
            list(o.outputs[0].token_ids)
            for o in llm.generate(given, sampling, use_tqdm=False, lora_request=lora[number])
        ]
    (folder / "tokens.json").write_text(json.dumps(outputs))
    llm.llm_engine.engine_core.shutdown()


def let_attention_be_seen() -> None:
    """Have weights made up that are large enough for what attention reads to be seen in what is answered."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights

    def then_enlarge(self, model, *args, **kwargs) -> None:
        load(self, model, *args, **kwargs)
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.data.fill_(1.0)
            elif weight.ndim > 1 and "embed" not in name:
                weight.data.mul_(120.0)

    DummyModelLoader.load_weights = then_enlarge


def enlarge_states(model: Any) -> None:
    """Make what goes into the states of a model's convolutions, and what comes of them, large enough to be seen."""
    for name, weight in model.named_parameters():
        if name.endswith(("operator_norm.weight", "conv.weight")):
            weight.data.mul_(1e5 if "norm" in name else 1e3)


def with_aborts(llm: Any, number: int, prompts: list, sampling: list) -> list[list[int]]:
    """Answer prompts step by step; the first is aborted while it runs with the others."""
    engine, answers = llm.llm_engine, {}
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        one.max_tokens += 40 * (i == 1)
        engine.add_request(f"{number}-{i}", prompt, one)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if step == 6:
            engine.abort_request([f"{number}-0"])
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def with_all_put_back(llm: Any, number: int, prompts: list, sampling: list, when: tuple[int, int]) -> list[list[int]]:
    """Answer prompts step by step; in a batch, before a step, all that run are put back and the cache is emptied."""
    engine, answers = llm.llm_engine, {}
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add_request(f"{number}-{i}", prompt, one)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if (number, step) == when:
            llm.reset_prefix_cache(reset_running_requests=True)
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def with_an_abort_while_it_loads(llm: Any, number: int, prompts: list, sampling: list) -> list[list[int]]:
    """Answer prompts step by step; the first of the second batch is aborted when the step that begins its load has ended."""
    engine, answers = llm.llm_engine, {}
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add_request(f"{number}-{i}", prompt, one)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if (number, step) == (1, 1):
            engine.abort_request(["1-0"])
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def with_one_that_leaves(
    llm: Any, number: int, prompts: list, sampling: list, when: tuple[int, int]
) -> list[list[int]]:
    """Answer prompts step by step; the first of a batch is left before a step, and nobody sees what it was answered."""
    engine, answers = llm.llm_engine, {}
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add_request(f"{number}-{i}", prompt, one)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if (number, step) == when:
            engine.abort_request([f"{number}-0"])
            answers.pop(f"{number}-0", None)
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def with_added_adapters(llm: Any, number: int, prompts: list, sampling: list, folder: Path) -> list[list[int]]:
    """Answer prompts for two tenants by turns, step by step; while all are being answered a third and a fourth are added."""
    engine, answers = llm.llm_engine, {}
    both = [adapter(folder, i, f"tenant {i}") for i in (1, 2)]
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        one.max_tokens += 16
        engine.add_request(f"{number}-{i}", prompt, one, lora_request=both[i % 2])
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if step in (9, 17):
            more = 3 + (step > 9)
            engine.add_lora(adapter(folder, more, f"tenant {more}"))
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def with_further_input(llm: Any, number: int, prompts: list, sampling: list) -> list[list[int]]:
    """Answer prompts step by step, each of which goes on with the end of the next one behind its answer; all are put back once."""
    from collections import defaultdict

    from vllm.sampling_params import RequestOutputKind

    engine, answers = llm.llm_engine, defaultdict(list)

    def add(i: int, tokens: list[int], more: bool) -> None:
        one = sampling[i].clone()
        one.output_kind = RequestOutputKind.DELTA
        request = engine.input_processor.process_inputs(
            f"{number}-{i}",
            {"prompt_token_ids": tokens},
            one,
            supported_tasks=engine.get_supported_tasks(),
            resumable=more,
        )
        request.external_req_id = request.request_id
        engine.output_processor.add_request(request, None, None, 0)
        engine.engine_core.add_request(request)

    for i, prompt in enumerate(prompts):
        add(i, prompt["prompt_token_ids"], True)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if step == 4:
            for i in range(len(prompts)):
                add(i, prompts[(i + 1) % len(prompts)]["prompt_token_ids"][-9:], True)
                add(i, [0], False)  # no more than that
        if step == 20:
            llm.reset_prefix_cache(reset_running_requests=True)
        for o in engine.step():
            answers[o.request_id] += o.outputs[0].token_ids
    return [answers[name] for name in sorted(answers)]


def with_turns(llm: Any, number: int, prompts: list, sampling: list) -> list[list[int]]:
    """Answer prompts step by step until each has 64 tokens, and compute what is put in behind that.

    Later prompts have one turn. Sessions are never done for this engine, which is left when it has no more to do.
    """
    from collections import defaultdict

    from vllm.sampling_params import RequestOutputKind

    engine, answers = llm.llm_engine, defaultdict(list)

    def add(i: int, tokens: list[int], more: bool) -> None:
        one = sampling[i].clone()
        one.output_kind, one.max_tokens = RequestOutputKind.DELTA, 64 - len(prompts[i]["prompt_token_ids"])
        request = engine.input_processor.process_inputs(
            f"{number}-{i}",
            {"prompt_token_ids": list(tokens)},  # which a session makes longer
            one,
            supported_tasks=engine.get_supported_tasks(),
            resumable=more,
        )
        request.external_req_id = request.request_id
        engine.output_processor.add_request(request, None, None, 0)
        engine.engine_core.add_request(request)

    for i, prompt in enumerate(prompts):
        if number == 0:
            add(i, prompt["prompt_token_ids"], True)
        else:
            engine.add_request(f"{number}-{i}", prompt, sampling[i])
    for step in range(80):
        if number and [len(answers[f"{number}-{i}"]) for i in range(len(prompts))] == [s.max_tokens for s in sampling]:
            break
        if (number, step) == (0, 3):
            for i in range(len(prompts)):
                add(i, prompts[(i + 1) % len(prompts)]["prompt_token_ids"][-11:], True)
                add(i, [0], False)  # no more than that
        for o in engine.step():
            if number == 0:
                answers[o.request_id] += o.outputs[0].token_ids
            else:
                answers[o.request_id] = list(o.outputs[0].token_ids)
    return [answers[name] for name in sorted(answers)]


def with_new_weights(llm: Any, number: int, prompts: list, sampling: list) -> list[list[int]]:
    """Answer prompts step by step; the first ones get new weights while they run, and another that begins as they do."""
    import torch

    engine, answers = llm.llm_engine, {}
    for i, (prompt, one) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add_request(f"{number}-{i}", prompt, one)
    for step in range(400):
        if not engine.has_unfinished_requests():
            break
        if step == 10 and number == 0:
            new = torch.randn(96, generator=torch.Generator().manual_seed(7))
            weights = ("model.layers.0.input_layernorm.weight", new)
            llm.apply_model(lambda model, new=weights: model.load_weights([new]))
            llm.reset_prefix_cache(reset_running_requests=True)
        if step == 12 and number == 0:
            again = {"prompt_token_ids": prompts[0]["prompt_token_ids"][:70]}
            engine.add_request(f"{number}-again", again, sampling[1].clone())
        answers |= {o.request_id: list(o.outputs[0].token_ids) for o in engine.step()}
    return [answers[name] for name in sorted(answers)]


def adapter(folder: Path, number: int, called: str = "tenant", seed: int = 0) -> Any:
    """Write an adapter of random weights for the tiny Llama; return what a request names it by: all have one name unless told."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    place = folder / f"adapter{number}"
    place.mkdir(exist_ok=True)
    shape = {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA", "bias": "none"}
    (place / "adapter_config.json").write_text(json.dumps({**shape, "base_model_name_or_path": "llama"}))
    drawn, weights = torch.Generator().manual_seed(seed or number), {}
    for layer in range(3):
        for name, width in (("q_proj", 192), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            weights[f"{at}_A.weight"] = torch.randn(8, 96, generator=drawn)
            weights[f"{at}_B.weight"] = torch.randn(width, 8, generator=drawn)
    save_file(weights, place / "adapter_model.safetensors")
    return LoRARequest(called, number, str(place))


def start(name: str, folder: Path, more: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Start one bug, or a setup without any, with `more` arguments for the engine; return the process id."""
    folder.mkdir(parents=True, exist_ok=True)

    def act() -> None:
        from bugs import load
        from kvcanary.recorder.engines.vllm import hooks

        hooks.install()
        bug = None if name.startswith("clean:") else load("vllm")[name]
        if bug is not None:
            bug.patch(fired_in([]))
        try:
            generate(bug.setup if bug is not None else name.removeprefix("clean:"), folder, more)
        finally:
            for attachment in hooks.attachments:
                for recorder in attachment.recorders():
                    recorder.close()

    return fork(folder / "log", act, {"KVCANARY_TRACE": str(folder / "traces")})


if __name__ == "__main__":
    from engine import ENVIRONMENT, import_engine

    wanted = {
        **ENVIRONMENT,
        "KVCANARY_COMPRESSION": "zstd",
        "KVCANARY_FLUSH_INTERVAL_MS": "3600000",
        "PYTHONPATH": os.pathsep.join([str(HERE), str(CONFORMANCE), os.environ.get("PYTHONPATH", "")]),
    }
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    import_engine()
    for one in sys.argv[2:]:
        print(one, wait_for(start(one, Path(sys.argv[1]) / one.replace(":", "-")), 240.0), flush=True)
