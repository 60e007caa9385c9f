"""Links, passwords, sessions and names of the console."""

from __future__ import annotations

import pytest

from rlearner.console.access import (
    SESSION_S,
    ConsoleAccess,
    PasswordLimit,
    is_known_host,
    is_same_origin,
)
from rlearner.console.gate import _own_path, policy


def test_a_link_works_once_and_the_next_is_said() -> None:
    said: list[str] = []
    access = ConsoleAccess(on_token=said.append)
    token = access.new_link()
    assert said == [token]
    assert access.use_link(token + "x", 0.0) is None
    assert access.use_link("", 0.0) is None
    cookie = access.use_link(token, 0.0)
    assert cookie is not None
    assert access.is_valid(cookie, 1.0)
    assert access.use_link(token, 2.0) is None
    assert len(said) == 2
    assert said[1] != token
    assert access.use_link(said[1], 3.0) not in (None, cookie)


def test_no_link_was_made_so_none_works() -> None:
    assert ConsoleAccess().use_link("", 0.0) is None


def test_sessions_end_when_unused_or_ended_and_the_oldest_gives_way() -> None:
    access = ConsoleAccess(password="a long password")
    cookies = [access.use_password("a long password", float(number)) for number in range(65)]
    assert all(isinstance(cookie, str) for cookie in cookies)
    assert [
        access.is_valid(str(cookie), 65.0) for cookie in (cookies[0], cookies[1], cookies[64])
    ] == [
        False,
        True,
        True,
    ]
    access.end(str(cookies[64]))
    assert not access.is_valid(str(cookies[64]), 66.0)
    assert access.is_valid(str(cookies[1]), 65.0 + SESSION_S)  # the last request counts
    assert not access.is_valid(str(cookies[2]), 66.0 + SESSION_S)
    assert not access.is_valid("", 66.0)


def test_wrong_passwords_have_to_wait_longer_and_longer_but_a_link_never() -> None:
    access = ConsoleAccess(password="a long password")
    token = access.new_link()
    assert [access.use_password("wrong", 0.0) for _ in range(5)] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert access.use_password("a long password", 0.5) == 0.5  # not looked at
    assert access.use_password("wrong", 1.0) == 2.0
    assert access.use_password("wrong", 3.0) == 4.0
    assert isinstance(access.use_link(token, 3.5), str)
    assert isinstance(access.use_password("a long password", 7.0), str)
    assert access.use_password("wrong", 7.0) == 0.0
    limit = PasswordLimit()
    for _ in range(40):
        limit.failed(0.0)
    assert limit.wait_s(0.0) == 60.0


def test_no_password_is_right_without_one() -> None:
    assert ConsoleAccess().use_password("", 0.0) == 0.0


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("127.0.0.1:8870", True),
        ("LOCALHOST:9000", True),
        ("[::1]:8870", True),
        ("evil.example:8870", False),
        ("127.0.0.1.evil.example", False),
        ("127.0.0.1@evil.example", False),
        ("", False),
        ("[::1", False),
        ("console.lab", True),
    ],
)
def test_names_of_the_host(host: str, known: bool) -> None:
    assert is_known_host(host, {"127.0.0.1", "localhost", "::1", "console.lab"}) is known


def test_origins() -> None:
    assert is_same_origin("http://127.0.0.1:8870", "http", "127.0.0.1:8870")
    for other in (
        "",
        "null",
        "https://127.0.0.1:8870",
        "http://127.0.0.1:8871",
        "http://evil.example",
    ):
        assert not is_same_origin(other, "http", "127.0.0.1:8870")


@pytest.mark.parametrize(
    "target", ["//evil.example", "/\\evil.example", "https://evil.example", "", "/a\r\nb", "\\\\x"]
)
def test_a_login_leads_only_to_own_pages(target: str) -> None:
    assert _own_path(target) == "/"


def test_own_pages_stay() -> None:
    assert _own_path("/run/quick?metrics=a%2Fb") == "/run/quick?metrics=a%2Fb"


def test_policy_allows_inline_scripts_only_with_the_nonce() -> None:
    rules = dict(part.strip().split(" ", 1) for part in policy("abc").split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == "'self' 'nonce-abc' 'unsafe-eval'"
    assert rules["connect-src"] == rules["font-src"] == "'self'"
    assert "http" not in policy("abc")
