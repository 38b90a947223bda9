"""`python -m clipx.data.prepare`: converts images and captions into WebDataset shards."""
