"""Implementations checked in the model's world: the reference kernels and connector, and released vLLM."""

import os

# Read when CUDA starts, so set before anything here can start it.  Streams beyond these share a queue of the
# device and wait for one another, which a held stream must not make others do (impl.streams).
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# A kernel that is loaded when it is first launched may wait for all that run, held ones too.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
