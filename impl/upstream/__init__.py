"""Released vLLM as a policy: the real scheduler-side objects, one release a process, only the workers
simulated.

``env`` prepares a release, ``releases`` says which ones are known, ``child`` is the handle on the process
that runs one, ``driver`` answers the questions inside it, ``build`` turns a configuration into vLLM's objects
and
``observe`` turns vLLM's objects into plain data.  ``worker_order`` states the order of operations that each
release's worker enqueues in a step.  Nothing of vLLM is copied here; nothing here changes what it decides.
"""
