"""Averages of the weights of fine-tuned models: WiSE-FT (arXiv:2109.01903), model soups (arXiv:2203.05482)."""
