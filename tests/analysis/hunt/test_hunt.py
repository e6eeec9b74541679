"""Hunting: the same requests for a seed, judged as they are recorded; what showed it made smaller; no engine needed for it."""

import json
import sys
import threading
import time
from collections import Counter
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvcanary.analysis.hunt.coverage import PATHS, Coverage
from kvcanary.analysis.hunt.run import RecordedRun
from kvcanary.analysis.hunt.server import Asker, Server
from kvcanary.analysis.hunt.workload import INGREDIENTS, Limits, Step, make_round, read_workload, write_workload
from kvcanary.cli import main
from kvcanary.recorder.trace.reader import TraceReader

from ...support.places import DATA
from .served import Engine

FIELDS = [{"logprobs": 2}, {"n": 2, "stream_options": {"include_usage": True}}]
LIMITS = Limits(
    pool=400, longest=200, vocabulary=500, page=16, adapters=("tuned", "other"), fields=FIELDS, jitter_ms=20
)
BAD, CLEAN = DATA / "kv_flip.arrow", DATA / "clean_llama.arrow"
STEPS = [Step(do="ask", at_ms=n, name=f"r{n}", prompt=[3, 4, 5, 6], max_tokens=1) for n in range(4)]


def test_a_seed_gives_the_same_requests_and_an_aim_what_leads_there(tmp_path):
    rounds = [make_round(1, number, aim, LIMITS) for number, aim in enumerate(("", *PATHS))]
    assert rounds == [make_round(1, number, aim, LIMITS) for number, aim in enumerate(("", *PATHS))]
    assert rounds[0] != make_round(2, 0, "", LIMITS)
    write_workload(tmp_path / "w.jsonl", rounds[0])
    assert read_workload(tmp_path / "w.jsonl") == rounds[0]
    ends = {"": 0}
    for step in (step for steps in rounds for step in steps if step.do == "ask"):
        ends[step.name] = ends[step.continues] + len(step.prompt) + step.max_tokens  # continues what does not leave
        assert len(step.prompt) > 0 and step.max_tokens > 0 and ends[step.name] <= LIMITS.longest
        assert step.abort_after < 0 or ends.pop(step.name)
    given = [step.fields for steps in rounds for step in steps if step.do == "ask"]
    assert all(fields in given for fields in [{}, *FIELDS]) and len(given) == sum(map(given.count, [{}, *FIELDS]))
    reached = [Counter() for _ in PATHS]
    for path, found in zip(PATHS, reached, strict=True):
        for number in range(5):
            for step in make_round(3, number, path, LIMITS):
                found.update(
                    abort=step.abort_after >= 0,
                    adapter=bool(step.adapter),
                    share=bool(step.continues),
                    pause=step.do == "pause",
                )
    assert all(found[path] for path, found in zip(PATHS, reached, strict=True) if path in ("abort", "adapter", "share"))
    plain = Limits(pool=400, longest=200, vocabulary=500, without=frozenset(INGREDIENTS))
    assert {step.do for step in make_round(1, 0, "abort", plain)} == {"ask", "wait"}


@pytest.mark.parametrize("pool", [320, 640])
def test_a_crowd_is_admitted_together_and_outgrows_the_pool(pool):
    outgrown = 0
    for number in range(20):
        steps = make_round(5, number, "retract", Limits(pool=pool, longest=240, vocabulary=500))
        at_once = Counter[int]()
        for step in steps:
            if step.do == "ask" and len(step.prompt) <= pool // 16:
                at_once[step.at_ms] += len(step.prompt) + step.max_tokens
        outgrown += max(at_once.values(), default=0) > pool
    assert outgrown > 10, outgrown


@pytest.mark.parametrize(
    ("trace", "reached"),
    [
        ("vllm-clean-llama-preempt", {"chunk": 5, "share": 6, "mixed": 7, "retract": 4, "evict": 6}),
        ("vllm-clean-llama-eagle", {"draft": 54}),
        ("transformers-clean-offload", {"offload": 3, "load_back": 3, "retract": 2, "evict": 3}),
        ("sglang-clean-llama-retract", {"retract": 4}),
        ("vllm-clean-llama-loads-few", {"offload": 18, "load_back": 2, "copy": 0}),
    ],
)
def test_which_paths_a_recording_reached(trace, reached):
    coverage = Coverage()
    with TraceReader(DATA / "corpus" / f"{trace}.arrow") as reader:
        for batch in reader.stream():
            coverage.take(trace, batch)
    found = {path: coverage.reached[path] for path in reached}
    assert found == reached
    assert coverage.has_history != ("loads" in trace) and (
        "eagle" not in trace or coverage.reached["draft_reject"] > 10
    )


def test_a_server_is_asked_at_the_times_and_left_where_a_step_says_so():
    Engine.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        server = Server(f"http://127.0.0.1:{httpd.server_port}", 5.0)
        assert server.is_ready() and server.describe() == (99, ["tuned", "other"])
        paused = []
        steps = [
            Step(do="ask", name="a", prompt=[3, 4], max_tokens=3),
            Step(do="ask", name="b", prompt=[5], continues="a", max_tokens=2, adapter="tuned"),
            Step(do="ask", name="c", prompt=[6], max_tokens=300, abort_after=4),
            Step(do="pause", at_ms=1, process=2, for_ms=30),
            Step(do="flush"),
            Step(do="swap", adapter="tuned"),
            Step(do="swap", adapter="tuned"),
            Step(do="swap", adapter="not served"),
            Step(do="ask", name="d", prompt=[7] * 60, max_tokens=2),
            Step(do="ask", name="e", prompt=[8], max_tokens=2, fields={"n": 2, "temperature": 1}),
        ]
        asker = Asker(server, steps, lambda *given: paused.append(given))
        while not asker.done:
            time.sleep(0.01)
        httpd.shutdown()
    assert (
        asker.counts == {"answered": 3, "left": 1, "flushed": 1, "swapped": 2, "not swapped": 1, "refused": 1}
        and "too long" in asker.refusal
    )
    assert paused == [(2, 0.03)]
    bodies = {tuple(body["prompt"]): body for _, body in Engine.asked if "prompt" in body}
    assert (
        bodies[3, 4, 7, 7, 7, 5]["model"] == "tuned" and bodies[3, 4]["model"] == "m"
    )  # behind prompt and answer of a
    assert bodies[8,]["n"] == 2 and bodies[8,]["temperature"] == 1 and bodies[8,]["max_tokens"] == 2
    assert [path for path, _ in Engine.asked if path == "/reset_prefix_cache"]
    swapped = [(path, body) for path, body in Engine.asked if path.endswith("_lora_adapter")]
    there_and_back = [
        [("unload", {"lora_name": "tuned"}), ("load", {"lora_name": "tuned", "lora_path": folder})]
        for folder in ("/b", "/a")
    ]
    assert swapped == [(f"/v1/{path}_lora_adapter", body) for pair in there_and_back for path, body in pair]


def test_a_server_is_started_asked_judged_and_ended(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), None) as free:
        port = free.server_port
    engine = [sys.executable, Path(__file__).with_name("served.py"), "--port", port]
    words = ("hunt", "--json", "--jitter", 5, "--minutes", 0.02)
    clean = run(*words, "-o", tmp_path / "a", "--", *engine, CLEAN)
    result = json.loads(clean.stdout)
    assert clean.exit_code == 0 and result["requests"]["answered"] and result["rounds"], clean.output
    bad = run(*words, "-o", tmp_path / "b", "--", *engine, BAD)
    assert bad.exit_code == 1 and json.loads(bad.stdout)["incident"]["kind"] == "kv_changed"
    gone = run(*words, "-o", tmp_path / "c", "--", sys.executable, "-c", "print('no model')")
    assert gone.exit_code == 2 and "ended with 0" in gone.output and "ends with: no model" in gone.output


def test_a_server_that_was_there_before_is_not_asked(tmp_path):
    Engine.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        words = ("hunt", "-o", tmp_path / "a", "--", sys.executable, "-c", "import time; time.sleep(60)")
        done = run(*words, "--port", httpd.server_port)
        httpd.shutdown()
    assert done.exit_code == 2 and "somebody listens there" in done.output, done.output
    assert not Engine.asked


def run(*words):
    return CliRunner().invoke(main, list(map(str, words)))


def script(tmp_path, text):
    """Write an engine that records nothing itself: a shell script that puts a trace where a recorder would."""
    path = tmp_path / "engine.sh"
    path.write_text(f"grep -q ask $KVCANARY_WORKLOAD && {text}\n")
    return ["sh", path]


def test_stops_at_the_first_incident_with_what_shows_it(tmp_path):
    words = ("hunt", "--script", "--adapters", "first,second", "--rounds", 3, "--fields", '{"logprobs": 2}')
    words += ("-o", tmp_path / "out", "--json", "--")
    done = run(*words, *script(tmp_path, f"cp {BAD} $KVCANARY_TRACE"))
    result = json.loads(done.stdout)
    assert done.exit_code == 1 and result["exit_code"] == 1, done.output
    assert result["incident"]["kind"] == "kv_changed" and result["rounds"] == 3
    asked = read_workload(tmp_path / "out" / "round-0000" / "workload.jsonl")
    assert {step.adapter for step in asked} == {"", "first", "second"}
    assert result["requests"] == {"given to the script": sum(step.do == "ask" for step in asked)}
    assert (tmp_path / "out" / "small.arrow").exists() and result["shrunk_trace"].endswith("small.arrow")
    assert sorted({str(step.fields): step.fields for step in asked}.values(), key=len)[::-1] == [{"logprobs": 2}, {}]
    for text in ("no JSON", "[2]"):
        wrong = run("hunt", "--fields", text, "-o", tmp_path / "wrong", "--", "true")
        assert wrong.exit_code == 2 and text in wrong.output
    again = run("hunt", "--script", "-o", tmp_path / "out", "--", "true")
    assert again.exit_code == 2 and "is not empty" in again.output


def test_a_hunt_that_was_interrupted_guesses_no_other_cause(tmp_path, monkeypatch):
    drive = RecordedRun.drive

    def interrupted(self, steps, until):
        drive(self, steps, until)
        raise KeyboardInterrupt

    monkeypatch.setattr(RecordedRun, "drive", interrupted)
    write_workload(tmp_path / "w.jsonl", STEPS)
    once = ("hunt", "--workload", tmp_path / "w.jsonl", "--script", "-o")
    silent = run(*once, tmp_path / "a", "--", "true")
    assert silent.exit_code == 125 and "interrupted" in silent.output
    assert "no Python program" not in silent.output, silent.output
    clean = run(*once, tmp_path / "b", "--", *script(tmp_path, f"cp {CLEAN} $KVCANARY_TRACE/$$.arrow"))
    assert clean.exit_code == 0 and "nothing found before that" in clean.output, clean.output


def test_nothing_found_and_nothing_recorded_are_not_the_same(tmp_path):
    engine = script(tmp_path, f"cp {CLEAN} $KVCANARY_TRACE/$$.arrow")
    write_workload(tmp_path / "w.jsonl", STEPS)
    once = ("--workload", tmp_path / "w.jsonl", "--script")
    clean = run("hunt", *once, "-o", tmp_path / "a", "--", *engine)
    assert clean.exit_code == 0 and "nothing found" in clean.output, clean.output
    silent = run("hunt", *once, "-o", tmp_path / "b", "--", "true")
    assert silent.exit_code == 125 and "true is no Python program" in silent.output
    said = "echo Traceback; echo 'ValueError: too few blocks'; echo further"
    failed = run(
        "hunt", *once, "-o", tmp_path / "c", "--", *script(tmp_path, f"cp {CLEAN} $KVCANARY_TRACE; {said}; exit 3")
    )
    assert failed.exit_code == 125 and "ended with 3" in failed.output, failed.output
    assert f"{tmp_path}/c/round-0000/engine.log ends with: ValueError: too few blocks" in failed.output
    broken = script(tmp_path, f"cp {CLEAN} $KVCANARY_TRACE; echo no trace > $KVCANARY_TRACE/other.arrow")
    unreadable = run("hunt", *once, "-o", tmp_path / "u", "--", *broken)
    assert unreadable.exit_code == 125 and "other.arrow" in unreadable.output, unreadable.output
    absent = run("hunt", *once, "-o", tmp_path / "d", "--", "no-such-engine")
    assert absent.exit_code == 2 and "cannot be started" in absent.output
    still = run(
        "hunt",
        *once,
        "--patience",
        1,
        "-o",
        tmp_path / "e",
        "--",
        *script(tmp_path, f"cp {CLEAN} $KVCANARY_TRACE; exec sleep 60"),
    )
    assert still.exit_code == 125 and "stood still" in still.output


def test_a_script_is_ended_when_the_time_is_over(tmp_path):
    slow = script(tmp_path, f"cp {CLEAN} $KVCANARY_TRACE; exec sleep 60")
    done = run("hunt", "--script", "--minutes", 0.05, "--patience", 20, "-o", tmp_path / "out", "--", *slow)
    assert done.exit_code == 0 and "nothing found" in done.output, done.output


def test_shrinks_a_workload_by_running_it(tmp_path):
    write_workload(tmp_path / "w.jsonl", [*STEPS, Step(do="wait")])
    # damage needs r1 and r3, of which one has a prompt of two tokens at least
    engine = script(
        tmp_path,
        f'grep -q r1 $KVCANARY_WORKLOAD && grep r3 $KVCANARY_WORKLOAD | grep -q "3,4" && cp {BAD} $KVCANARY_TRACE; cp {CLEAN} $KVCANARY_TRACE',
    )
    words = ("--script", "--run", " ".join(map(str, engine)), "-o", tmp_path / "small.jsonl", "--json")
    done = run("shrink", tmp_path / "w.jsonl", *words)
    assert done.exit_code == 0, done.output
    result, small = json.loads(done.stdout), read_workload(tmp_path / "small.jsonl")
    assert [(step.name, len(step.prompt), step.max_tokens) for step in small] == [("r1", 1, 1), ("r3", 2, 1)]
    assert result["after"] == {"requests": 2, "prompt_tokens": 3, "max_tokens": 2, "other_steps": 0}
    assert result["incident"]["kind"] == "kv_changed" and result["trace"].endswith("kv_flip.arrow")
    write_workload(tmp_path / "w.jsonl", STEPS[:1])
    nothing = run("shrink", tmp_path / "w.jsonl", *words, "--force")
    assert nothing.exit_code == 125 and "no incident" in nothing.output


def test_a_fault_that_shows_now_and_then_is_neither_lost_nor_taken_for_gone(tmp_path):
    short = [Step(do="ask", name=f"r{n}", prompt=[3], max_tokens=1) for n in range(3)]
    write_workload(tmp_path / "w.jsonl", short)
    # damage needs r0, and shows in every second run; without r2 it showed once, by luck
    shows = "[ $(($(wc -l < runs) % 2)) = 0 ] && { grep -q r2 $KVCANARY_WORKLOAD || mkdir luck; }"
    engine = script(
        tmp_path,
        f"cd {tmp_path} && echo run >> runs && {{ [ $(wc -l < runs) != 3 ] || exit 3; }} && grep -q r0 $KVCANARY_WORKLOAD && {shows} && cp {BAD} $KVCANARY_TRACE || cp {CLEAN} $KVCANARY_TRACE",
    )
    words = ("--script", "--run", " ".join(map(str, engine)), "-o", tmp_path / "small.jsonl", "--json", "--repeat", 2)
    done = run("shrink", tmp_path / "w.jsonl", *words)
    assert done.exit_code == 0, done.output
    result, small = json.loads(done.stdout), read_workload(tmp_path / "small.jsonl")
    assert [step.name for step in small] == ["r0", "r2"] and (tmp_path / "luck").exists()
    assert result["shown_in"] == "1 of 2" and not result["stopped"] and Path(result["trace"]).exists()
