"""One module a mechanism: the story, and the invariants that must hold."""
