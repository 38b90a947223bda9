"""Teachers for distillation: a model that runs on each batch, or stored embeddings."""
