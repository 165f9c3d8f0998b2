"""Attention kernels in CUDA C++ for Hopper (compute capability 9.0), compiled by NVRTC when they are first needed.

``forward.py`` is the way in: it turns tensors into launches of ``forward.cu``. ``tiles.py`` is the one table of tile
sizes, ``instructions.py`` writes the wrappers of the matrix instructions that a specialisation needs.
"""
