"""Conversion of images and captions into WebDataset shards."""
