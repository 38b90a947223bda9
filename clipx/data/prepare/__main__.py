"""`python -m clipx.data.prepare source=… out=…`: converts images and captions into WebDataset shards."""

from clipx.data.prepare.prepare import main

if __name__ == "__main__":  # worker processes import this module again
    main()
