"""Requests validate themselves: field, limit and value in every refusal."""

from __future__ import annotations

import math

import pytest

from kvtier.errors import InvalidRequest
from kvtier.record import NO_TENANT, tenant_digest
from kvtier.request import Request, SamplingParams
from kvtier.retention import PLAIN, Retention


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


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("cache_salt", "s" * 257, "at most 256 characters, got 257"),
        ("cache_salt", None, "must be text"),
        ("cache_tenant", "t" * 257, "at most 256 characters, got 257"),
        ("cache_tenant", "\ud800", "must be text that UTF-8 can hold"),
        ("cache_tenant", b"t", "must be text"),
        ("cache_priority", 101, "must be from -100 to 100, got 101"),
        ("cache_priority", -101, "must be from -100 to 100, got -101"),
        ("cache_priority", None, "must be a whole number, got None"),
        ("cache_priority", 1.0, "must be a whole number, got 1.0"),
        ("cache_ttl_s", 0, "must be from 1 to 31536000, got 0; leave it out"),
        ("cache_ttl_s", 31_536_001, "must be from 1 to 31536000, got 31536001; leave it out"),
        ("cache_ttl_s", True, "must be a whole number, got True; leave it out"),
        ("cache_pin", 1, "must be true or false, got 1"),
        ("cache_read", None, "must be true or false, got None"),
        ("cache_write", "false", "must be true or false, got 'false'"),
        ("priority", None, "must be a whole number, got None"),
    ],
)
def test_impossible_wishes_for_the_cache_are_refused(field: str, value: object, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request("x", **{field: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{field}: ") and said in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("cache_pin", True), ("cache_ttl_s", 5), ("cache_priority", -1)])
def test_what_is_kept_must_be_written(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request("x", cache_write=False, **{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"{field}: is for blocks that are kept, got {value} with cache_write false; leave one of them out"
    )


def test_a_request_that_writes_nothing_may_say_that_it_wants_nothing_kept() -> None:
    assert not Request("x", cache_write=False, cache_read=False, cache_priority=0, cache_pin=False).retention(5.0).asks


def test_retention_counts_seconds_from_the_arrival_and_never_ends_early() -> None:
    request = Request("x", cache_priority=-100, cache_ttl_s=31_536_000, cache_pin=True)
    assert request.retention(1000.25) == Retention(-100, 1001 + 31_536_000, True)
    assert Request("x").retention(1000.25) == PLAIN


def test_the_tenant_is_the_one_named_else_the_salt_else_none() -> None:
    assert Request("x", cache_salt="s", cache_tenant="t").retention(0.0).tenant == tenant_digest("t")
    assert Request("x", cache_salt="s").retention(0.0).tenant == tenant_digest("s")
    assert Request("x").retention(0.0).tenant == NO_TENANT
