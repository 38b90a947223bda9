"""Entry point of `python -m clipx.data.prepare`."""

from clipx.data.prepare.prepare import main

if __name__ == "__main__":  # worker processes import this module again
    main()
