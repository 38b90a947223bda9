"""Former module of the command `python -m clipx.prepare`."""

from clipx.commands import moved

if __name__ == "__main__":
    moved("prepare")
