"""`python -m clipx.vocabulary data=… out=words.json`: writes a word tokenizer of captions with few distinct words.

A text is split into words and runs of punctuation, in lower case, and padded on the left: its last token is the end
token, which model.text.pool=last reads.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clipx.cli import cli
from clipx.command_spec import UNUSED, DataGroupsSpec, given_data
from clipx.config.registry import frozen, option, register
from clipx.data.bad_samples import check_bad_share
from clipx.data.source import BadRecord, BadSample
from clipx.data.spec import VIEW_OPTIONS, Dataset, check_effect, open_data
from clipx.errors import DataError
from clipx.storage.local import write_atomically
from clipx.storage.url import check_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
SPECIAL = (PAD, END, UNKNOWN)
"""Special tokens, with the ids 0, 1 and 2. No text contains them: its < is a token apart."""

# Options of DataSpec that do not change the captions of a data set.
_UNUSED = (
    *"batch_size micro_batches workers prefetch shuffle_window".split(),
    *VIEW_OPTIONS,
    *"decode max_pixels replacement weight mismatched captions_per_step sub_captions caption_mask".split(),
)


@register("")
@frozen
class VocabularySpec(DataGroupsSpec):
    """`python -m clipx.vocabulary`: writes a word tokenizer of the captions of any data."""

    kind: str = "vocabulary"
    """Kind of the command's configuration. Fixed."""

    size: int = option(64, ge=len(SPECIAL) + 1)
    """Largest number of tokens: padding, end and unknown token, and the most frequent words. Words of equal frequency
    are sorted alphabetically."""

    out: str = option("words.json", check=check_file(".json"))
    """File to write, a tokenizer.json of the package tokenizers: a value of model.text.tokenizer."""

    def __post_init__(self) -> None:
        check_effect(self.data, _UNUSED, "the words of captions")


def vocabulary(spec: VocabularySpec) -> None:
    """Reads the captions, writes the tokenizer and prints how to use it."""
    from clipx.report.console import stdout_console

    data = given_data(spec.data)
    dataset = open_data(data)
    counts = count_words(_texts(dataset, data.max_bad_share))
    tokenizer = word_tokenizer(counts, spec.size)
    path = Path(spec.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: tokenizer.save(temporary))
    size = tokenizer.get_vocab_size()
    known = sum(counts[word] for word in tokenizer.get_vocab() if word in counts)
    console = stdout_console()
    console.print(
        f"{size - len(SPECIAL):,} of {len(counts):,} words, {known / counts.total():.2%} of the text, written to "
        f"{spec.out}"
    )
    options = f"model.text.tokenizer={shlex.quote(spec.out)} model.text.vocabulary={size}"
    console.print(f"use it: {options} model.text.pool=last model.text.packed=false")


def count_words(texts: Iterable[str]) -> Counter[str]:
    """Returns the number of occurrences of each word and run of punctuation, in lower case, in the first 4,096
    characters of each text."""
    from tokenizers import normalizers, pre_tokenizers

    from clipx.model.hf_tokenizer import clean_text
    from clipx.model.text_spec import Clean

    normalizer, splitter = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    counts = Counter[str]()
    for text in texts:
        cleaned = normalizer.normalize_str(clean_text(Clean.clip, text))
        counts.update(word for word, _ in splitter.pre_tokenize_str(cleaned))
    return counts


def word_tokenizer(counts: Counter[str], size: int) -> Tokenizer:
    """Returns a tokenizer of the special tokens and the most frequent words, at most `size` tokens in total.

    Words of equal frequency are sorted alphabetically. Raises DataError without a word.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = sorted(counts, key=lambda word: (-counts[word], word))
    if not words:
        raise DataError("the captions have no words: give other data")
    ids = {token: i for i, token in enumerate([*SPECIAL, *words[: size - len(SPECIAL)]])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, ids[END])])
    tokenizer.enable_padding(pad_id=ids[PAD], pad_token=PAD, direction="left")
    return tokenizer


def _texts(dataset: Dataset, max_bad_share: float) -> Iterator[str]:
    """Yields the captions of the training samples, and each prompt of the classes. Raises DataError for too many bad
    samples."""
    from clipx.report.console import track

    source, bad = dataset.train, list[BadRecord]()
    total = sum(source.sizes)
    for index in track(range(total), "reading captions", total, "samples"):
        captions: Sequence[str] = ()
        try:
            captions = source.read(index).captions
        except BadSample as error:
            bad.append(BadRecord(source.key(index), str(error)))
            check_bad_share(len(bad), total, max_bad_share, bad)
        yield from captions
    if dataset.classes is not None:
        yield from dataset.classes.names
        yield from (template.replace("{}", "") for template in dataset.classes.templates)


main = cli(vocabulary, "vocabulary", unused=UNUSED)

if __name__ == "__main__":
    main()
