"""Entry point of `python -m clipx.data.openclipart`."""

from clipx.data.openclipart.build import main

if __name__ == "__main__":  # worker processes import this module again
    main()
