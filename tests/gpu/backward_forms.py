"""The forms of the Hopper backward: what its tests and compute-sanitizer run, whatever the policy would choose."""

from __future__ import annotations

import dataclasses

# Whether blocks are persistent (up to a head_dim of 128), whether one kernel does all, and the forms for head
# dimensions of 128 and 256 alone: in the default mode.
FORMS = {
    "persistent": {"persistent": True, "fused": False},
    "block for each tile": {"persistent": False, "fused": False},
    "persistent fused": {"persistent": True, "fused": True},
    "fused": {"persistent": False, "fused": True},
    "unstaged or paired": {"persistent": False, "fused": False, "unstaged": True, "paired": True},
    "direct": {"persistent": True, "fused": False, "direct": True},
}


def use_form(monkeypatch, persistent, fused=False, unstaged=False, paired=False, direct=False):
    """All calls in the default mode run this form of the kernels, as far as there is one, however few their heads."""
    from torch_flashbackend import decisions, ops
    from torch_flashbackend.kernels.cuda import backward, tiles
    from torch_flashbackend.plans import Recent

    usual = getattr(tiles.choose_backward_usual, "unchanged", tiles.choose_backward_usual)
    dense = getattr(tiles.choose_backward, "unchanged", tiles.choose_backward)

    def choose_usual(head_dim, head_dim_v, is_causal, query_rows, deterministic):
        tile = usual(head_dim, head_dim_v, is_causal, query_rows, deterministic)
        return (
            tile
            if deterministic
            else dataclasses.replace(tile, persistent=persistent and max(head_dim, head_dim_v) <= 128)
        )

    def choose(head_dim, head_dim_v, is_causal, query_rows, deterministic):
        if deterministic:
            return dense(head_dim, head_dim_v, is_causal, query_rows, True)
        tile = choose_usual(head_dim, head_dim_v, is_causal, query_rows, deterministic)
        if paired and head_dim == head_dim_v == 256:
            return dataclasses.replace(tile, fused=True, paired=True, ds_stages=1)
        own = head_dim == head_dim_v
        return dataclasses.replace(
            tile,
            fused=fused,
            unstaged=unstaged and own and head_dim == 128,
            direct=direct and own and head_dim in (64, 128, 256) and is_causal and query_rows <= 4096,
        )

    choose_usual.unchanged, choose.unchanged = usual, dense
    monkeypatch.setattr(tiles, "choose_backward_usual", choose_usual)
    monkeypatch.setattr(tiles, "choose_backward", choose)
    monkeypatch.setattr(backward, "_saves_sums", lambda *_: True)
    monkeypatch.setattr(backward, "_plans", {})
    monkeypatch.setattr(ops, "_backwards", Recent())
    decisions.forget()
