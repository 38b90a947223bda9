"""`python -m clipx.embed run=… out=…`: embeds the images of a data source and their captions, and writes shards."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("embed")
