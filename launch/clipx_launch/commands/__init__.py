"""Commands that look after sweeps, one module each."""
