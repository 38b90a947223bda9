"""`--help KEY`: every option has a docstring, and the command prints it."""

from __future__ import annotations

import dataclasses

from helpers.specs import specs

from clipx.config.entries import field_docs

SPECS = specs()


def test_every_option_and_every_field_has_a_docstring() -> None:
    docs = {f"{spec.__name__}.{name}": doc for spec in SPECS for name, doc in field_docs(spec).items()}
    fields = [f"{spec.__name__}.{f.name}" for spec in SPECS for f in dataclasses.fields(spec) if f.name != "kind"]
    assert not [name for name in fields if name not in docs], "without an attribute docstring"
    assert not [name for name in fields if not docs[name].endswith(".")], "docstring does not end with a period"
    assert not [spec for spec in SPECS if (spec.__doc__ or "").startswith(f"{spec.__name__}(")], "without a docstring"
