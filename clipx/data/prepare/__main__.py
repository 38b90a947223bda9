"""`python -m clipx.data.prepare`."""

from clipx.data.prepare.prepare import main

if __name__ == "__main__":  # processes that prepare starts import this module again
    main()
