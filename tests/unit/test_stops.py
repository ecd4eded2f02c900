"""Stop strings: nothing of a stop leaks, nothing else is lost, and how the text is cut changes nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.tokens import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        text, stopped = matcher.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + matcher.finish(), False


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: the first end of any stop, the longest stop that ends there."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_any_cut_of_any_text_equals_the_definition(data: st.DataObject) -> None:
    letters = st.text("ab", min_size=1, max_size=5)
    stops = data.draw(st.lists(letters, max_size=3))
    pieces = data.draw(st.lists(st.text("abc", max_size=6), max_size=8))
    assert run(stops, pieces) == expected(stops, "".join(pieces))


def test_the_beginning_of_a_stop_is_held_until_it_is_known() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.push("hello <") == ("hello ", False)
    assert matcher.push("/s") == ("", False)
    assert matcher.push("x") == ("</sx", False)
    assert matcher.push("<") == ("", False)
    assert matcher.push("/s> more") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.finish() == ""


def test_a_stop_may_begin_inside_what_was_held() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aa") == ("", False)
    assert matcher.push("a") == ("a", False)
    assert matcher.push("b") == ("", True)


def test_what_is_held_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.finish() == "EN"


def test_without_stops_text_passes_through() -> None:
    assert StopMatcher([]).push("any") == ("any", False)
