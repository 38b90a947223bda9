"""`python -m clipx.data.look data=…`: writes an HTML page about a data set as training reads it."""

from clipx.data.look.look import main

if __name__ == "__main__":  # loader processes import this module again
    main()
