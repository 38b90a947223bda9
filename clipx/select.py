"""`python -m clipx.select scores=… out=ids.npy`: writes the ids of the samples that scores select."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("select")
