"""File access: this machine, any URL of fsspec, the Hugging Face hub."""
