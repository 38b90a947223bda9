"""`python -m clipx.vocabulary data=… out=words.json`: writes a word tokenizer of captions with few distinct words."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("vocabulary")
