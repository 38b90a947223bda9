"""Pretrained weights: loading, comparison with the model, and export to other libraries."""
