"""`python -m clipx.prepare source=… out=…`: converts images and captions into WebDataset shards."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("prepare")
