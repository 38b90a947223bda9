"""Models: an image tower and a text tower that return unit embeddings."""
