"""Two vLLM engines on the CPU joined by NIXL, recorded: a healthy pair must replay clean, a fault must be found.

    python tests/conformance/vllm/nixl_pair.py FOLDER            # a healthy pair and each fault
    python tests/conformance/vllm/nixl_pair.py FOLDER --only none

Needs `nixl` and `nixl-cu12` (1.5.1, without their dependencies: `pip install --no-deps nixl nixl-cu12`) beside what `install.sh` has.
The prefill engine computes a prompt, the decode engine reads its blocks by UCX over shared memory or TCP. Exit status 1 if something is
not as it should be.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAULTS = {
    "none": "",
    "reads_other_block": "the decode engine reads the blocks of a prompt in another order",
    "lands_elsewhere": "what it reads lands in each other's blocks",
    "changed": "V is negated when it has landed",
}
LENS = (70, 100, 33, 130, 96, 64)
PATIENCE_S = 400.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--side", choices=("producer", "consumer"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        run_side(args.side, args.folder, args.only)
        return 0
    wrong = 0
    for number, fault in enumerate(FAULTS):
        if args.only in fault:
            said = one(fault, args.folder / fault, 5600 + 10 * number)
            wrong += bool(said)
            print(f"{fault}: {said or 'as it should be'}", flush=True)
    return int(wrong > 0)


def one(fault: str, folder: Path, port: int) -> str:
    """Run a pair; return what is not as it should be."""
    folder.mkdir(parents=True)
    from engine import ENVIRONMENT

    running = []
    for number, side in enumerate(("producer", "consumer")):
        own = {"KVCANARY_TRACE": str(folder / side), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + number)}
        with (folder / f"{side}.log").open("w") as log:
            command = [sys.executable, __file__, str(folder), "--only", fault, "--side", side]
            environment = {"UCX_TLS": "tcp,shm,self", **os.environ, **ENVIRONMENT, **own}
            running.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    try:
        ended = [process.wait(PATIENCE_S) for process in running]
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        for process in running:
            process.kill()
    if any(ended):
        return f"the engines ended with {ended}"
    traces = [next((folder / side).glob("*.arrow")) for side in ("producer", "consumer")]
    command = [sys.executable, "-c", "from kvcanary.cli import replay_main; replay_main()", *map(str, traces), "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    (folder / "replay.json").write_text(ran.stdout + ran.stderr)
    if ran.returncode not in (0, 1):
        return ran.stderr[-300:]
    _, decodes = json.loads(ran.stdout)
    if decodes["transfers_unmatched"] or decodes["transfers_received"] != len(LENS):
        return f"{decodes['transfers_received']} received, {decodes['transfers_unmatched']} of them unmatched"
    kinds = set(decodes["findings_by_kind"])
    if fault == "none":
        return "" if not ran.returncode else f"a healthy pair has {kinds}"
    return "" if "transfer_differs" in kinds else f"not found: {kinds}"


def run_side(side: str, folder: Path, fault: str) -> None:
    """Be one of the engines."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if side == "consumer":
        plant(fault)
    llm = LLM(
        model=str(HERE / "models" / "llama"), load_format="dummy", skip_tokenizer_init=True, dtype="float32",
        max_model_len=256, block_size=32, enforce_eager=True, seed=1, max_num_seqs=8,
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role=f"kv_{side}", kv_buffer_device="cpu"),
    )  # fmt: skip
    rng = random.Random(7)
    prompts = [[rng.randrange(10, 200) for _ in range(count)] for count in LENS]
    prompts[2] = prompts[0][:32] + prompts[2]  # its first block is in the decode engine's cache by then

    def generate(prompt: list[int], count: int, **params: object) -> object:
        sampling = {"temperature": 0, "ignore_eos": True, "detokenize": False, "extra_args": params or None}
        return llm.generate(
            [{"prompt_token_ids": prompt}], SamplingParams(max_tokens=count, **sampling), use_tqdm=False
        )[0]

    for number, prompt in enumerate(prompts):
        said, read = folder / f"{number}.json", folder / f"{number}.read"
        if side == "producer":
            out = generate(prompt, 1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
            (folder / "told").write_text(json.dumps(out.kv_transfer_params))
            (folder / "told").rename(said)
            wait_for(read)
        else:
            wait_for(said)
            generate(prompt, 8, kv_transfer_params=json.loads(said.read_text()))
            read.touch()
    for _ in range(3):  # steps in which the prefill engine is told what has been read
        generate([5, 6, 7], 2)
        time.sleep(0.3)
    llm.llm_engine.engine_core.shutdown()


def wait_for(path: Path) -> None:
    """Wait until the other side has got so far."""
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > end:
            raise SystemExit(f"{path.name} never came")
        time.sleep(0.05)


def plant(fault: str) -> None:
    """Have the decode engine read wrongly."""
    from dataclasses import replace

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_worker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector

    worker = pull_worker.NixlPullConnectorWorker
    read, names = worker._read_blocks, {"reads_other_block": "remote_block_ids", "lands_elsewhere": "local_block_ids"}
    if fault in names:

        def reads(self: object, read_spec: object, *args: object, **more: object) -> bool:
            ids = [list(reversed(group)) for group in getattr(read_spec, names[fault])]
            return read(
                self, replace(read_spec, **{names[fault]: type(getattr(read_spec, names[fault]))(ids)}), *args, **more
            )

        worker._read_blocks = reads
    if fault == "changed":
        ended = NixlConnector.get_transfer_results

        def get_transfer_results(self: object, names: set[str]) -> object:
            found = ended(self, names)
            if found.finished_recving:
                cache = next(iter(self.connector_worker.device_kv_caches.values()))
                for block in range(1, 20):
                    first = cache[block][0]  # [tokens, K and V] of the first head, all its K before its V
                    first.view(2 * first.shape[0], -1)[first.shape[0] :] *= -1
            return found

        NixlConnector.get_transfer_results = get_transfer_results


if __name__ == "__main__":
    sys.exit(main())
