"""Soak: clients are served by the implementation, as it is and with each fault in it."""
