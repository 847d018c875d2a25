"""The scheduler side: block pool, table managers, hit lookup, steps, offload and the host tier."""
