"""Proofs: a symbolic integer that runs the shared formulas, the theorems about them, and two solvers."""
