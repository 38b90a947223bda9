"""`python -m clipx.data.prepare`: images and captions -> WebDataset shards."""
