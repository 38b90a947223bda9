"""Files anywhere: on this machine, at any URL, on the Hugging Face hub."""
