"""What runs on the GPU: kernels and their launchers, nothing else.

Installed as ``torch_flashbackend.kernels``. May import torch and triton; may not import ``torch.library`` ops, routing
or anything else of the plugin. Imported by ``torch_flashbackend.ops``.
"""
