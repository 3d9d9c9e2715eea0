"""The files of the pages."""

from __future__ import annotations

import re

import pytest

from headrace.observe.web import CONTENT_POLICY, web_file, web_files, web_text

PAGES = ("dashboard.html", "lab.html", "playground.html")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_and_all_that_it_loads_weigh_less_than_300_kb(page: str) -> None:
    names = [page, *_loaded(page)]
    assert sum(len(web_file(name).body) for name in names) < 300_000


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_its_own_files_only(page: str) -> None:
    text = web_text(page)
    assert _loaded(page) == [name for name in _loaded(page) if web_file(name).body]
    assert "http:" not in text
    assert "https:" not in text
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", text), "the policy allows no code or style in a page"


def test_no_file_is_left_over() -> None:
    used = {name for page in PAGES for name in (page, *_loaded(page))}
    assert {file.name for file in web_files()} == used


def test_the_policy_allows_this_server_alone() -> None:
    assert "default-src 'none'" in CONTENT_POLICY
    assert "unsafe" not in CONTENT_POLICY
    assert "*" not in CONTENT_POLICY


def test_a_files_tag_follows_its_content() -> None:
    tags = {file.tag for file in web_files()}
    assert len(tags) == len(web_files())
    assert all(re.fullmatch(r'"[0-9a-f]{16}"', tag) for tag in tags)


def _loaded(page: str) -> list[str]:
    return re.findall(r'(?:href|src)="/web/([^"]+)"', web_text(page))
