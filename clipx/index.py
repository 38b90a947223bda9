"""`python -m clipx.index shards=…`: indexes shards before a run, on one machine or as a job array."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("index")
