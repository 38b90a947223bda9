"""Weights of others: read, compared with the model, and written for others."""
