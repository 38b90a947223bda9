"""The mathematics of the objectives: kernels over tiles of pairs, temperatures, state of each sample."""
