"""Traces of real engines in data/: two SGLang versions, transformers against SGLang, and the faulty ones."""

import pytest
from kvcanary.analysis.diff.compare import diff_traces
from kvcanary.analysis.diff.settings import DiffSettings, NotComparableError

from ...support.places import DATA

VERSIONS = DATA / "versions"
OLD, NEW = VERSIONS / "sglang_0.5.16.arrow", VERSIONS / "sglang_0.5.23.arrow"
OTHER = VERSIONS / "transformers_5.23.0.arrow"


def test_two_versions_of_sglang_are_the_same_to_the_byte():
    result = diff_traces(OLD, NEW)
    assert result.verdict == "same"
    assert result.pairing.by == "prompt"
    assert result.compared == {"tokens": 200, "sampled": 72, "kv": 200}
    assert result.headers[0]["engine"]["version"] == "0.5.16"


def test_transformers_and_sglang_round_differently():
    result = diff_traces(OTHER, NEW)
    assert set(result.counts) == {"kv", "hit", "schedule"}
    assert "e-08 (fp32)" in result.first.words
    assert diff_traces(OTHER, NEW, settings=DiffSettings(kv_tolerance=1e-5)).verdict == "same"
    assert diff_traces(OTHER, NEW, settings=DiffSettings(kv_tolerance=1e-12)).verdict == "different"
    timing = result.timing
    assert timing.a_cached == timing.b_cached == 48
    assert timing.other_hits == 2
    assert timing.other_chunks == 4


@pytest.mark.parametrize(
    ("trace", "kind", "request_name", "forward", "words"),
    [
        ("kv_flip", "kv_changed", "long", 20, "KV bytes of position 21 changed"),
        (
            "table_swap",
            "table",
            "long",
            18,
            "reads position 40 in slot 608, which holds position 40 of request shared-b",
        ),
        ("token_swap", "input", "short", 15, "was fed token 490 in A, 48 in B"),
        ("position_plus_one", "position", "shared-b", 22, "was fed at position 71 in A, 72 in B"),
        ("free_too_early", "table", "short", 21, "reads position 0 in slot"),
    ],
)
def test_the_cause_comes_first(trace, kind, request_name, forward, words):
    first = diff_traces(DATA / "clean_llama.arrow", DATA / f"{trace}.arrow").first
    assert (first.kind, first.request, first.b_forward) == (kind, request_name, forward)
    assert words in first.words


@pytest.mark.parametrize(("pair", "different"), [("clean_pd", 0), ("clean_pd_swa", 0), ("pd_transfer_wrong_stride", 4)])
def test_what_was_sent_against_what_was_received(pair, different):
    folder = DATA / "simulated" / pair
    result = diff_traces(folder / "prefill.arrow", folder / "decode.arrow")
    assert result.pairing.by == "room"
    assert result.num_different == different
    assert result.compared["kv"] > 900
    assert any("side" in note for note in result.notes)


def test_what_cannot_be_compared_is_said():
    with pytest.raises(NotComparableError, match="'llama', B of 'gemma3_text'"):
        diff_traces(DATA / "clean_llama.arrow", DATA / "clean_hybrid.arrow")
    with pytest.raises(NotComparableError, match="no request in common: A has 8, B has 15"):
        diff_traces(DATA / "clean_llama.arrow", DATA / "clean_fork_dedup_evict.arrow")
    with pytest.raises(NotComparableError, match=r"dtype 'bytes'.*--kv-dtype"):
        pair = DATA / "simulated" / "clean_pd"
        diff_traces(pair / "prefill.arrow", pair / "prefill.arrow", settings=DiffSettings(kv_tolerance=0.1))
