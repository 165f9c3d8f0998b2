"""Portable attention kernels in Triton: NVIDIA GPUs of compute capability 8.0 and later; AMD CDNA3 compiles too.

``attention.py`` is the way in: it turns tensors into launches. ``forward.py`` and ``backward.py`` hold the kernels,
``common.py`` what these share, ``tiles.py`` the one table of tile sizes, ``launch.py`` compiles and launches.
"""
