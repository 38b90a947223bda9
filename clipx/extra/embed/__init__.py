"""Embeddings of a data source by a trained model, in shards that teachers, towers and other programs read."""
