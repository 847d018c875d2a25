"""`python -m impl.bench`: speed of the kernels beside upstream's, naive versions and floors."""
