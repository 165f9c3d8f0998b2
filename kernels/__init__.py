"""What runs on the GPU: kernels and their launchers, nothing else.

Installed as ``torch_flashbackend.kernels``. May import torch, triton, and of the plugin only ``nvrtc.py``,
``driver.py``, ``plans.py`` and ``_torch.py``; may not import ``torch.library`` ops, routing or anything else. Imported
by ``torch_flashbackend.ops``.
"""


class KernelUnavailable(RuntimeError):
    """A kernel could not be compiled or loaded; nothing was launched: the caller may compute the result otherwise."""


launch_counts: dict[str, int] = {}
"""How often each kernel was launched in this process, by name; those of every launcher."""
