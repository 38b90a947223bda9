"""Texts that a cleaning changes, drawn with a fixed seed."""

from __future__ import annotations

import random
from html.entities import codepoint2name, html5
from unicodedata import category, combining, name

BASIC = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]
WORDS = """a photo of the cat Dog's O'Neil isn't WE'LL I'm naïve Zürich façade 猫 собака Σίσυφος ΣΊΣΥΦΟΣ ΟΔΟΣ Σ İstanbul
Straße STRAẞE ǅungla ſo K Å 1,000 £3.50 5:30pm 3½ Ⅷ IMG_2041.JPG http://a.b/c?d=e&f=g user@example.com #tag
AT&T R&D a&b && <b> </i> <3 a<b \\n snake_case '90s rock'n'roll ''s""".split()
PUNCTUATION = [c for c in BASIC if category(c) in ("Pi", "Pf", "Pd", "Ps", "Pe") or "QUOTATION" in name(c, "")]
LETTERS = [c for c in BASIC if any(word in name(c, "") for word in ("LIGATURE", "FULLWIDTH", "HALFWIDTH"))]
MARKS = [c for c in BASIC if combining(c)]
SPACES = [c for c in BASIC if c.isspace()]
CONTROLS = [c for c in BASIC if category(c) in ("Cc", "Cf")]
OTHER = "👩‍👩‍👧‍👦 👍🏽 🏴󠁧󠁢󠁷󠁬󠁳󠁿 1️⃣ 🇫🇷 🙂 \x1b[31m \x1b[0m \x1b[1;44 \x1b".split()
SPECIAL = "<start_of_text> <end_of_text> <End_Of_Text> <|endoftext|> <|startoftext|> </w> !!<end_of_text>".split()
MOJIBAKE = ["schÃ¶n", "donâ€™t", "â€œquotedâ€\x9d", "voilÃ\xa0", "caf\x82", "Â£5", "ð\x9f\x98\x80"]
COMMON = "quot lt gt nbsp eacute copy rsquo ldquo hellip mdash frac12 times trade".split()


def odd_texts(count: int, seed: int) -> list[str]:
    """Returns texts of words, typographic and invisible characters, references, markup and special tokens."""
    rng = random.Random(seed)

    def some(pieces: list[str], most: int = 2) -> str:
        return "".join(rng.choices(pieces, k=rng.randint(1, most)))

    makers = {
        lambda: some(WORDS, 1): 30,
        lambda: some(WORDS, 1).upper(): 5,
        lambda: some(PUNCTUATION) + some(WORDS, 1) + rng.choice("’‘“”–—…🙶"): 8,
        lambda: some(LETTERS, 3): 5,
        lambda: rng.choice("aeiouAEnﬁａΣ'<") + some(MARKS): 4,
        lambda: some(SPACES): 5,
        lambda: some(CONTROLS, 1) + some(WORDS, 1): 3,
        lambda: some(OTHER, 1): 4,
        lambda: some(SPECIAL, 3): 3,
        lambda: _reference(rng, rng.choice(COMMON)): 10,
        lambda: _reference(rng, rng.choice(list(codepoint2name.values()))): 3,
        lambda: _reference(rng, rng.choice(list(html5)).rstrip(";")): 1,
        lambda: chr(rng.randrange(0xE000, 0x110000)) + some(BASIC, 1): 2,
        lambda: some(MOJIBAKE, 1): 1,
    }

    def text() -> str:
        length = rng.choice([0, 1, 3, 6, 12, rng.choice([12, 12, 150])])
        drawn = rng.choices(list(makers), list(makers.values()), k=length)
        return "".join(make() + rng.choice(["", " ", " ", " ", "\n"]) for make in drawn)

    return [text() for _ in range(count)]


def _reference(rng: random.Random, name: str) -> str:
    """Returns an HTML reference by name or number, often escaped again."""
    code = ord(html5.get(f"{name};", "?")[0])
    spelled = rng.choice([name, name, name, name.upper(), f"#{code}", f"#0{code}", f"#x{code:x}", f"#X00{code:X}"])
    escaped = rng.choice(["", "", "", "amp;", "amp", "AMP;", "#38;", "#x26;", "amp;amp;", "amp;amp;amp;"])
    return f"&{escaped}{spelled}{rng.choice([';', ';', ';', ''])}"
