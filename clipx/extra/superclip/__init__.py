"""SuperCLIP (arXiv:2512.14480)."""
