"""What every Hopper GPU has, as schedules and launches count on it.

May import nothing of ours. Imported by whatever of this folder makes launches.
"""

from __future__ import annotations

# Of the L2 cache (50 MB), what the heads in work at one time should fit: keys and values of a forward beside what is
# written; queries, their gradients and their float32 sums of a backward.
L2_BYTES = 32 << 20
# Blocks of one launch, in its first dimension.
MAX_BLOCKS = 2**31 - 1
