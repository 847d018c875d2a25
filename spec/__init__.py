"""The model: world, policies, invariants, arithmetic and proofs. No torch; z3 only under ``spec.prove``."""
