"""`python -m clipx.wise_ft base=… finetuned=…`: averages the weights of a model and of its fine-tuned versions."""

from clipx.commands import start

if __name__ == "__main__":  # loader processes import this module again
    start("wise-ft")
