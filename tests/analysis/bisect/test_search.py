"""The search, against every history that there can be."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcanary.analysis.bisect.search import BisectVerdict, Mark, decided, search, vote

GOOD, BAD, SKIP = (BisectVerdict(mark=o, words=o.value) for o in (Mark.GOOD, Mark.BAD, Mark.SKIP))


def run(history):
    asked = []

    def judge(index):
        asked.append(index)
        return history[index]

    found = search(len(history), judge)
    assert len(asked) == len(set(asked))
    assert dict(found.judged) == {i: history[i] for i in asked}
    return found, asked


def truth(first_bad, count, skipped):
    return [SKIP if i in skipped else BAD if i >= first_bad else GOOD for i in range(count)]


@pytest.mark.parametrize("count", range(2, 9))
def test_every_history_is_answered_right(count):
    for first_bad in range(1, count):
        for skips in range(count):
            for skipped in itertools.combinations(range(count), skips):
                history = truth(first_bad, count, skipped)
                good = max((i for i in range(first_bad) if i not in skipped), default=-1)
                bad = min((i for i in range(first_bad, count) if i not in skipped), default=count)
                found, _ = run(history)
                if good < 0 or bad == count:
                    assert found.candidates == ()
                    assert found.problem
                else:
                    assert found.candidates == tuple(range(good + 1, bad + 1))
                    assert (found.good, found.bad) == (good, bad)
                    assert not found.problem


@given(st.integers(2, 3000), st.data())
def test_it_halves(count, data):
    first_bad = data.draw(st.integers(1, count - 1))
    found, asked = run(truth(first_bad, count, ()))
    assert found.candidates == (first_bad,)
    assert asked[:2] == [0, count - 1]
    assert len(asked) <= 2 + (count - 1).bit_length()


@given(st.lists(st.sampled_from([GOOD, BAD, SKIP]), min_size=1, max_size=7), st.sampled_from(["majority", "any"]))
def test_a_vote_is_decided_no_sooner_than_it_is(trials, rule):
    for taken in range(1, len(trials) + 1):
        if decided(trials[:taken], rule, len(trials) - taken):
            assert vote(trials[:taken], rule).mark is vote(trials, rule).mark
    judged = [t.mark for t in trials if t is not SKIP]
    if not judged:
        assert vote(trials, rule).mark is Mark.SKIP
    elif rule == "any":
        assert (vote(trials, rule).mark is Mark.BAD) == (Mark.BAD in judged)
    else:
        assert (vote(trials, rule).mark is Mark.BAD) == (2 * judged.count(Mark.BAD) >= len(judged))


def test_an_end_may_have_to_be_judged():
    assert search(3, lambda i: [SKIP, GOOD, BAD][i], inward=False).problem == "the good end cannot be judged: skip"
    assert search(3, lambda i: [GOOD, BAD, SKIP][i], inward=False).problem == "the bad end cannot be judged: skip"
    assert search(3, lambda i: [GOOD, SKIP, BAD][i], inward=False).candidates == (1, 2)
