"""Entry point of `python -m clipx.data.look`."""

from clipx.data.look.look import main

if __name__ == "__main__":  # loader processes import this module again
    main()
