"""Speed of the kernels on a CUDA device, beside upstream's, naive versions and floors: `python -m impl.bench`."""
