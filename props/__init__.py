"""Properties: Hypothesis machines and brute force over spec, and over spec and impl in lockstep."""
