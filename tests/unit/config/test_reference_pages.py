"""The generated pages of the reference: complete, and with the text of the docstrings."""

from __future__ import annotations

import html
import re
from functools import cache

import pytest

from clipx.config.catalogue import folder_of, groups, load_all, options
from clipx.config.entries import spec_entries
from clipx.config.registry import LIST_GROUPS, kinds
from reference_pages import pages


@cache
def site() -> tuple[dict[str, str], dict[str, dict[str, type]]]:
    """Returns the pages, and the registered kinds of each group, to which other tests add some later."""
    return pages(), {group: kinds(group) for group in groups()}


def written() -> dict[str, str]:
    return site()[0]


def items(page: str) -> dict[str, tuple[str, str]]:
    """Returns the definitions of a page: by term its facts and its description, as a reader sees them."""
    found = re.findall(
        r"<dt[^>]*><code>(.*?)</code>(.*?)</dt>\n<dd>(.*?)</dd>", written()[f"reference/{page}.md"], re.S
    )
    return {shown(term): (shown(facts), shown(about)) for term, facts, about in found}


def shown(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", text))


load_all()
GROUPS = groups()


def test_each_group_has_a_page() -> None:
    assert {f"reference/{name}.md" for name in (*GROUPS, "run", "commands", "exit_codes")} == written().keys()


@pytest.mark.parametrize("group", GROUPS)
def test_the_page_of_a_group_has_every_option_and_every_key(group: str) -> None:
    found, folder = items(group), folder_of(group)
    for name in options(group):
        choice = f"{folder}=[{name}]" if group in LIST_GROUPS else f"{folder}={name}"
        about = found[f"python -m clipx.bench {name}" if group == "bench" else choice][1]
        assert len(about.partition("Keys:")[0].split()) > 1, f"{choice} has no description"
    key = f"{folder.replace('/', '.')}.NAME." if group in LIST_GROUPS else f"{folder.replace('/', '.')}."
    prefix = "" if group == "bench" else key
    text = shown(written()[f"reference/{group}.md"]).replace("`", "")
    for kind, spec in site()[1][group].items():
        for entry in spec_entries(spec, None, prefix):
            assert entry.key in found, (kind, entry.key)
            assert " ".join(entry.doc.replace("`", "").split()) in text, (kind, entry.key)
