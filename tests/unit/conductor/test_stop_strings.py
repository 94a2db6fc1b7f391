from __future__ import annotations

import random

from conductor.stop_strings import StopMatcher


def test_text_is_cut_at_the_first_stop_string_however_it_is_split() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(20)))
        stop = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 3))]
        matcher = StopMatcher(stop)
        out, position = "", 0
        while position < len(text):
            step = rng.randrange(1, 4)
            out += matcher.feed(text[position : position + step])
            assert not any(s in out for s in stop), "a stop string was shown"
            position += step
        out += matcher.flush()
        # Text arrives in order, so the stop string that is complete first ends the answer.
        if matcher.matched is None:
            assert out == text
            assert not any(s in text for s in stop)
        else:
            assert text.startswith(out + matcher.matched)
            assert not any(s in out for s in stop)


def test_nothing_is_held_back_without_need() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.feed("hello s") == "hello "
    assert matcher.feed("tar") == "star"
    assert matcher.feed("sto") == ""
    assert matcher.feed("ne") == "stone"
    assert StopMatcher([]).feed("anything") == "anything"


def test_nothing_passes_after_a_match() -> None:
    matcher = StopMatcher(["\n\n", "END"])
    assert matcher.feed("one\n\ntwo END") == "one"
    assert matcher.matched == "\n\n"
    assert matcher.feed("more") == ""
    assert matcher.flush() == ""
