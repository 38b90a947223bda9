"""Teachers for distillation: a model that sees each batch, or stored embeddings."""
