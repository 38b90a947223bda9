"""The generated pages of the reference: complete, and with the text of the docstrings."""

from __future__ import annotations

import dataclasses
import html
import re
from functools import cache

import pytest

from clipx.config.catalogue import commands, folder_of, groups, load_all, options
from clipx.config.entries import spec_entries
from clipx.config.messages import LIST_GROUPS
from clipx.config.registry import kinds
from clipx.errors import Exit
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


def test_every_command_has_its_keys() -> None:
    page = written()["reference/commands.md"]
    for command in commands():
        assert f"## {command.module}\n" in page
        section = page.partition(f"## {command.module}\n")[2].partition("\n## ")[0]
        if command.config not in ("train", "bench"):
            own = {f.name for f in dataclasses.fields(command.spec)} - {"kind"} - set(groups())
            own -= {f.name for f in dataclasses.fields(kinds("")["run"])} if command.config == "plan" else set()
            assert all(f"<code>{key}</code>" in section for key in own), command.module
    assert "<code>--metric" in page.partition("### clipx-sweep best")[2]
    assert "`python -m clipx.evaluate`, installed as `clipx-evaluate`." in page


def test_every_exit_code_is_described() -> None:
    found = items("exit_codes")
    assert {int(code) for code in found} == set(Exit)
    assert all(about.endswith(".") for _, about in found.values())
