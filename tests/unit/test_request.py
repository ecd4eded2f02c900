"""Requests validate themselves: field, limit and value in every refusal."""

from __future__ import annotations

import math

import pytest

from kvtier.errors import InvalidRequest
from kvtier.request import Request, SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", 0, "from 1"),
        ("max_tokens", -3, "-3"),
        ("max_tokens", "8", "whole number"),
        ("max_tokens", True, "whole number"),
        ("temperature", math.nan, "finite"),
        ("temperature", -0.1, "from 0"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.5, "1.5"),
        ("min_p", 2, "from 0 to 1"),
        ("repetition_penalty", 0.0, "from 0.01 to 100"),
        ("repetition_penalty", 1e-300, "from 0.01 to 100, got 1e-300"),
        ("repetition_penalty", 101, "from 0.01 to 100, got 101"),
        ("temperature", 10**400, "from 0 to 100, got a number beyond all bounds"),
        ("seed", 2**64, "got 18446744073709551616"),
        ("presence_penalty", 3, "from -2"),
        ("frequency_penalty", math.inf, "finite"),
        ("seed", -1, "from 0"),
        ("stop", ("",), "1 to 256"),
        ("stop", ("a",) * 17, "at most 16"),
        ("stop_token_ids", (-1,), "from 0"),
    ],
)
def test_impossible_sampling_is_refused(field: str, value: object, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert field in str(caught.value) and said in str(caught.value)


def test_numbers_too_long_to_write_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"max_tokens: must be from 1 to .*, got a number beyond all bounds"):
        SamplingParams(max_tokens=10**5000)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt: str | list[int]) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        Request(prompt)


def test_a_long_salt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cache_salt"):
        Request("x", cache_salt="s" * 257)
