"""Former module of the command `python -m clipx.look`."""

from clipx.commands import moved

if __name__ == "__main__":
    moved("look")
