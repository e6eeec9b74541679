"""Running a prefill and a decode engine of SGLang's side by side, each forked from a process that has imported it all."""

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import CPU_ENGINE, MODELS

TRANSFER = Path(__file__).parent / "standin" / "transfer"
ROLES = ("prefill", "decode")
HEALTH_CHECK = 9  # tokens of its prompt
NEW_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One run of both engines; `fault` befalls the KV write or, where it is the prefill engine's own, the request `at`."""

    model: str
    page_size: int
    fault: str = "none"
    at: int = 3
    overlap: bool = False
    cached: bool = False
    ranks: int = 1
    seed: int = 1

    @property
    def name(self) -> str:
        """What the run is called."""
        options = ("-overlap" if self.overlap else "") + ("-cached" if self.cached else "")
        options += f"-tensor{self.ranks}" if self.ranks > 1 else ""
        return f"{self.model}-{self.fault}-page{self.page_size}-seed{self.seed}{options}"


def import_backend() -> None:
    """Import what a pair needs beyond an engine, with the stand-in in the place of Mooncake's own package."""
    sys.path.insert(0, str(TRANSFER))
    from sglang.srt.disaggregation.mooncake import conn

    # Page numbers go over pinned memory and an event of the device, unless a sender cannot take them so.
    conn.MooncakeKVSender.supports_host_tensor_indices = False


def run_pair(pair: Pair, folder: Path, timeout_s: float, *, recorded: bool = True) -> dict[str, int]:
    """Run both engines; each one's log, outputs and trace go into `folder / role`. Return their exit statuses."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    running = {}
    for role in ROLES:
        place = folder / role
        place.mkdir(parents=True)
        pid = os.fork()
        if pid == 0:
            _engine(pair, role, folder, port, recorded=recorded)
        running[pid] = role
    statuses: dict[str, int] = {}
    deadline = time.monotonic() + timeout_s
    while len(statuses) < len(running) and time.monotonic() < deadline:
        for pid, role in running.items():
            done, status = os.waitpid(pid, os.WNOHANG) if role not in statuses else (0, 0)
            if done:
                statuses[role] = os.waitstatus_to_exitcode(status)
                if statuses[role] != 0:  # the other one may wait for it in vain
                    deadline = min(deadline, time.monotonic() + 20)
        time.sleep(0.1)
    for pid, role in running.items():
        if role not in statuses:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            statuses[role] = -1
    return statuses


def _engine(pair: Pair, role: str, folder: Path, port: int, *, recorded: bool) -> None:
    """Be one engine, and end."""
    status = 1
    try:
        os.setpgid(0, 0)
        log = os.open(folder / role / "log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # The engine's own check finds what is injected, and ends it.
        os.environ |= {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0", "SGLANG_HOST_IP": "127.0.0.1"}
        if pair.ranks > 1:  # SGLang binds each rank to cores of its own
            cores = sorted(os.sched_getaffinity(0))
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[n % len(cores)]) for n in range(pair.ranks))
        if pair.overlap:  # sending cached prefixes early then waits for an event of the device
            os.environ["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"
        if recorded:
            os.environ["KVCANARY_TRACE"] = str(folder / "traces")
        if role == "prefill":
            inject(pair)
        serve(pair, role, folder, port)
        status = 0
    except BaseException:  # noqa: BLE001  # told, whatever it is
        import traceback

        traceback.print_exc()
    finally:
        (folder / role / "done").touch()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(pair: Pair, role: str, folder: Path, port: int) -> None:
    """Start one side, send it its half of each request, and shut it down once the other side has its answers, too."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    options: dict[str, Any] = {}
    if role == "decode":
        options = {"num_reserved_decode_tokens": 16, "disaggregation_decode_enable_radix_cache": pair.cached}
        backup = "disaggregation_decode_retraction_backup"
        if backup in ServerArgs.__annotations__:
            options[backup] = "cpu_tensor"  # there is no pinned memory for the other
    engine = Engine(
        model_path=str(MODELS / pair.model),
        **CPU_ENGINE,
        disable_overlap_schedule=not pair.overlap,
        page_size=pair.page_size,
        max_total_tokens=512,
        random_seed=pair.seed,
        host="127.0.0.1",
        tp_size=pair.ranks,
        disaggregation_mode=role,
        disaggregation_transfer_backend="mooncake",
        disaggregation_bootstrap_port=port,
        **options,
    )
    outputs = engine.loop.run_until_complete(_requests(pair, engine, port))
    (folder / role / "outputs.json").write_text(json.dumps(outputs))
    (folder / role / "done").touch()
    other = folder / ROLES[1 - ROLES.index(role)] / "done"
    while not other.exists():
        time.sleep(0.1)
    engine.shutdown()


def make_prompts(seed: int) -> list[list[int]]:
    """Return the prompts of a run: some share a prefix, and two that are computed side by side are the same."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    shared = tokens(20)
    prompts = [(shared if i % 2 == 0 else []) + tokens(rng.randrange(5, 40)) for i in range(5)]
    prompts[3] = list(prompts[2])
    return [*prompts, prompts[0][:28] + tokens(9)]


async def _requests(pair: Pair, engine: Any, port: int) -> list[Any]:
    """Send a health check and the requests; return the tokens of each request, or why it failed."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    async def request(prompt: list[int], room: int, host: str = "127.0.0.1") -> Any:
        try:
            sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
            answer = await engine.async_generate(
                input_ids=prompt,
                sampling_params=sampling,
                bootstrap_host=host,
                bootstrap_port=port,
                bootstrap_room=room,
            )
        except Exception as error:  # noqa: BLE001  # the engine says of each request why it failed
            return f"{type(error).__name__}: {error}"
        return answer["output_ids"]

    # As SGLang does when it starts, and when its health is asked for.
    await request([7] * HEALTH_CHECK, 0, FAKE_BOOTSTRAP_HOST)
    prompts = make_prompts(pair.seed)
    rooms = [random.Random(f"{pair.name} {number}").getrandbits(63) for number in range(len(prompts))]
    outputs = []
    for batch in (slice(0, 4), slice(4, None)):  # the later ones hit the prefix cache
        sent = zip(prompts[batch], rooms[batch], strict=True)
        outputs += await asyncio.gather(*(request(prompt, room) for prompt, room in sent))
    return outputs


def inject(pair: Pair) -> None:
    """Put a fault into the prefill engine: on the way, or into its own handling of the request `at`."""
    if pair.fault not in ("damaged", "early_free", "none"):
        os.environ["TRANSFER_FAULT"] = f"{pair.fault}:{pair.at}"
    if pair.fault == "damaged":
        damage_before_sending(pair.at)
    if pair.fault == "early_free":
        os.environ["TRANSFER_FAULT"] = f"slow:{pair.at}"
        free_while_sending(pair.at)


def damage_before_sending(at: int) -> None:
    """Flip a bit of a request's KV after it was computed and before its last chunk is sent."""
    from sglang.srt.managers.scheduler import Scheduler

    send, seen = Scheduler.send_kv_chunk, [0]

    def damaging_send(self: Any, req: Any, last_chunk: bool = False, end_idx: int | None = None) -> None:
        seen[0] += last_chunk
        if last_chunk and seen[0] == at:
            slot = int(self.req_to_token_pool.req_to_token[_row(req), len(req.origin_input_ids) - 1])
            keys = self.token_to_kv_pool_allocator.get_kvcache().get_key_buffer(0)
            keys[slot].view(-1).view(dtype=_bytes())[1] ^= 0x20
            print(f"\ninjected damaged in slot {slot} before it is sent", flush=True)
        send(self, req, last_chunk=last_chunk, end_idx=end_idx)

    Scheduler.send_kv_chunk = damaging_send


def free_while_sending(at: int) -> None:
    """Give a request's last page back while it is being sent."""
    from sglang.srt.managers.scheduler import Scheduler

    poll, seen = Scheduler.process_disagg_prefill_inflight_queue, set()

    def freeing_poll(self: Any, *args: Any, **kwargs: Any) -> Any:
        for req in self.disagg_prefill_inflight_queue:
            seen.add(req.rid)
            if len(seen) == at:
                seen.add("done")
                seen.add("so that no other comes to the same number")
                last = (len(req.origin_input_ids) - 1) // self.page_size * self.page_size
                slot = self.req_to_token_pool.req_to_token[_row(req), last : last + 1].long()
                self.token_to_kv_pool_allocator.free(slot)
                print(f"\ninjected early_free of slot {int(slot)} while it is being sent", flush=True)
        return poll(self, *args, **kwargs)

    Scheduler.process_disagg_prefill_inflight_queue = freeing_poll


def _row(req: Any) -> int:
    return int(req.kv.req_pool_idx if hasattr(req.kv, "req_pool_idx") else req.req_pool_idx)


def _bytes() -> Any:
    import torch

    return torch.uint8
