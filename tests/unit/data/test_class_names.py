"""Class names and templates: the built-in lists equal OpenAI's (as in open_clip)."""

from __future__ import annotations

import open_clip
import pytest
import torch

from clipx.data.class_names import class_embeddings, read_names, read_templates


def test_imagenet_names_equal_open_clip() -> None:
    assert list(read_names("imagenet", "x")) == list(open_clip.IMAGENET_CLASSNAMES)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [("openai_imagenet", open_clip.OPENAI_IMAGENET_TEMPLATES), ("simple", open_clip.SIMPLE_IMAGENET_TEMPLATES)],
)
def test_templates_equal_open_clip(name: str, theirs: list[object]) -> None:
    filled = [template.replace("{}", "cat") for template in read_templates(name, "x")]
    assert filled == [template("cat") for template in theirs]  # type: ignore[operator]


def test_the_embedding_of_a_class_is_the_normalized_mean_of_its_prompts() -> None:
    known = {"cat": [1.0, 0.0], "a cat": [0.0, 1.0], "dog": [0.6, 0.8], "a dog": [0.6, 0.8]}
    found = class_embeddings(
        lambda texts: torch.tensor([known[text] for text in texts]), ["cat", "dog"], ["{}", "a {}"]
    )
    torch.testing.assert_close(found, torch.tensor([[0.5**0.5, 0.5**0.5], [0.6, 0.8]]))
