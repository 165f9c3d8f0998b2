"""Routing tables: which backend takes which call on which machine, and in what words the others refuse."""

from __future__ import annotations

import dataclasses

import torch
from expecttest import TestCase

from torch_flashbackend import policy
from torch_flashbackend.problem import MaskInfo, Problem
from torch_flashbackend.routing import AUTO, BACKENDS, decide, first_failure

H200, A100, RTX, AMD = "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X"
SHAPE = (2, 16, 4096, 128)


def problem(shape=SHAPE, gpu=H200, **kwargs) -> Problem:
    return Problem.from_shapes(shape, gpu=gpu, **kwargs)


def changed(base: Problem, **fields) -> Problem:
    return dataclasses.replace(base, **fields)


def expanded_strides(shape, expanded):
    """Strides of a contiguous tensor of this shape, with one dimension expanded."""
    stride = list(torch.empty(shape, device="meta").stride())
    stride[expanded] = 0
    return tuple(stride)


class RoutingTest(TestCase):
    maxDiff = None

    def setUp(self):
        # Without the measurements that may be installed: these tables are about everything else.
        self.policies = policy.policies
        policy.policies = dict

    def tearDown(self):
        policy.policies = self.policies

    def table(self, **problems: Problem) -> str:
        lines = []
        for name, call in problems.items():
            decision = decide(call)
            lines.append(f"{name}: {decision.backend} / {decision.layout} / {decision.reason}")
        return "\n".join(lines)

    def refusal(self, call: Problem, backend: str = "triton") -> str:
        failed = first_failure(call, backend, automatic=True)
        self.assertIsNotNone(failed)
        return f"{failed.name}: {failed.message(call)}"

    def test_a_step_of_decoding_has_a_hopper_kernel_where_its_queries_share_their_mask(self):
        def has_one(shape, stride, dtype=torch.bool, queries=1):
            step = problem((8, 32, queries, 128), kv_heads=8, seqlen_k=1000)
            step = changed(step, mask=MaskInfo(dtype, shape, stride, False, "cuda"))
            failed = first_failure(step, "cuda", automatic=True)
            return failed is None or "splits the keys" not in failed.message(step)

        self.assertTrue(has_one((8, 1, 1, 1000), (1000, 1000, 1000, 1)))
        self.assertTrue(has_one((1000,), (1,)) and has_one((1, 1000), (1000, 1)))
        self.assertTrue(has_one((8, 1, 4, 1000), (1000, 0, 0, 1), queries=4))
        self.assertFalse(has_one((8, 1, 4, 1000), (4000, 0, 1000, 1), queries=4))
        self.assertFalse(has_one((8, 32, 1, 1000), (32000, 1000, 1000, 1)))
        self.assertFalse(has_one((8, 1, 1, 1000), (1000, 1000, 1000, 1), torch.bfloat16))

    def test_an_old_gpu_leaves_every_call_to_stock(self):
        for gpu in ("Tesla V100", "Tesla T4"):
            for mask in (None, "bool", "float_grad"):
                for training in (False, True):
                    for entry in ("sdpa", "_scaled_dot_product_flash_attention"):
                        call = Problem.from_shapes(SHAPE, mask=mask, training=training, gpu=gpu, entry=entry)
                        decision = decide(call)
                        assert (decision.backend, decision.reason) == ("stock", "architecture")

    def test_what_stock_gets_wrong_is_taken(self):
        unaligned = changed(problem(), aligned=False)
        self.assertExpectedInline(
            self.table(
                mask_h200=problem(mask="bool"),
                negative_scale_h200=problem(scale=-0.5),
                negative_scale_a100=problem(scale=-0.5, gpu=A100),
                unaligned_h200=unaligned,
                unaligned_a100=changed(problem(gpu=A100), aligned=False),
                unaligned_padded=changed(problem((2, 16, 4096, 36), gpu=A100), aligned=False),
                empty_batch_h200=problem((0, 16, 4096, 128)),
                empty_batch_a100=problem((0, 16, 4096, 128), gpu=A100),
                no_keys=problem(seqlen_k=0),
                no_queries=problem((2, 16, 0, 128)),
                many_batches=problem((70000, 1, 16, 64), gpu=A100),
                head_dim_300=problem((2, 16, 4096, 300)),
                head_dim_512=problem((2, 16, 4096, 512)),
                rank_3=problem((16, 4096, 128)),
                only_flash_with_mask=changed(
                    problem(mask="bool"), sdp_backends=frozenset({"flash"}), stock_backend="error"
                ),
            ),
            """\
mask_h200: triton / query / stock is wrong: mask in cuDNN
negative_scale_h200: triton / query / stock is wrong: negative scale in cuDNN
negative_scale_a100: stock / query / unmeasured
unaligned_h200: triton / query / stock is wrong: alignment
unaligned_a100: triton / query / stock is wrong: alignment
unaligned_padded: triton / query / unmeasured, likely faster: head_dim
empty_batch_h200: cuda / query / stock is wrong: empty batch in cuDNN
empty_batch_a100: stock / query / nothing to compute
no_keys: cuda / bhsd / stock falls back to math
no_queries: stock / bhsd / nothing to compute
many_batches: triton / query / stock refuses: over 65535 batches or heads
head_dim_300: triton / bhsd / stock falls back to math
head_dim_512: triton / bshd / unmeasured, likely faster: head_dim
rank_3: cuda / bhsd / stock falls back to math
only_flash_with_mask: triton / query / stock refuses""",
        )

    def test_an_unmeasured_gpu_gets_masks_and_unusual_head_dims(self):
        self.assertExpectedInline(
            self.table(
                dense=problem(gpu=RTX),
                training=problem(gpu=RTX, training=True),
                causal=problem(gpu=RTX, is_causal=True),
                dropout=problem(gpu=RTX, dropout_p=0.1),
                gqa=problem(gpu=RTX, kv_heads=4),
                zero_scale=problem(gpu=RTX, scale=0.0),
                bool_mask=problem(gpu=RTX, mask="bool"),
                bias=problem(gpu=RTX, mask="float"),
                trained_bias=problem(gpu=RTX, mask="float_grad", training=True),
                mask_and_dropout=problem(gpu=RTX, mask="bool", dropout_p=0.1, training=True),
                head_dim_36=problem((2, 16, 4096, 36), gpu=RTX),
                head_dim_v=problem(gpu=RTX, head_dim_v=64),
                amd=problem(gpu=AMD),
                amd_mask=problem(gpu=AMD, mask="bool"),
                cpu=problem(gpu="cpu"),
                mps=problem(gpu="mps", mask="bool"),
            ),
            """\
dense: stock / query / unmeasured
training: stock / query / unmeasured
causal: stock / query / unmeasured
dropout: stock / query / unmeasured
gqa: stock / query / unmeasured
zero_scale: stock / query / unmeasured
bool_mask: triton / bshd / unmeasured, likely faster: bool_mask
bias: triton / bshd / unmeasured, likely faster: float_mask
trained_bias: triton / bshd / unmeasured, likely faster: mask_grad
mask_and_dropout: triton / bshd / unmeasured, likely faster: bool_mask
head_dim_36: triton / query / unmeasured, likely faster: head_dim
head_dim_v: triton / bshd / unmeasured, likely faster: head_dim
amd: stock / query / unmeasured
amd_mask: triton / bshd / unmeasured, likely faster: bool_mask
cpu: stock / query / device
mps: stock / query / device""",
        )

    def test_messages_have_the_callers_words_and_numbers(self):
        half = problem(mask="bool")
        self.assertExpectedInline(
            "\n".join(
                self.refusal(call)
                for call in (
                    problem(gpu="cpu"),
                    problem(gpu="Tesla T4"),
                    problem((2, 16, 4096, 600)),
                    problem(head_dim_v=513),
                    problem((2, 16, 4096, 0)),
                    problem(dtype=torch.float64),
                    problem(),
                    changed(half, sdp_backends=frozenset({"efficient", "math"})),
                    changed(half, transforms=True),
                    changed(half, tensor_types=("DTensor",), query_shape=(), key_shape=(), value_shape=()),
                    changed(half, key_dtype=torch.float16),
                    changed(half, devices=("cuda:0", "cpu")),
                    changed(half, key_shape=(16, 4096, 128)),
                    changed(half, key_shape=(2, 16, 4096, 64)),
                    changed(half, value_shape=(2, 16, 4095, 128)),
                    changed(problem(), key_shape=(2, 4, 4096, 128), value_shape=(2, 4, 4096, 128)),
                    problem(kv_heads=3),
                    changed(half, is_causal=True),
                    changed(half, mask=dataclasses.replace(half.mask, dtype=torch.int32)),
                    changed(half, mask=dataclasses.replace(half.mask, dtype=torch.float16)),
                    changed(half, mask=dataclasses.replace(half.mask, shape=(4, 1, 4096, 4096))),
                    changed(half, mask=dataclasses.replace(half.mask, shape=(4096,))),
                    problem(dropout_p=1.5),
                    problem(scale=float("nan")),
                )
            ),
            """\
device: the tensors are on cpu; the triton backend runs on NVIDIA and AMD GPUs
architecture: Tesla T4 is sm_75; the triton backend needs compute capability 8.0 (sm_80) or later, or an AMD GPU
head_dim: head_dim 600 is not supported by the triton backend (largest: 512)
value head_dim: value head_dim 513 is not supported by the triton backend (largest: 512)
head_dim: head_dim 0 is not supported by the triton backend (smallest: 1)
dtype: float64 is not supported by the triton backend (float16, bfloat16, float32)
policy: no measurements for NVIDIA H200; a plain dense call is left to stock
sdpa_kernel: torch.nn.attention.sdpa_kernel (or torch.backends.cuda) allows efficient, math here; torch_flashbackend counts as FLASH_ATTENTION, which is not among these
transform: a torch.func transform or forward-mode AD is active, which works on stock's operations
tensor type: DTensor: only plain tensors are taken, so that the type's own rules apply
dtypes: query, key and value have several dtypes: bfloat16, float16, bfloat16
devices: query, key, value and attn_mask are on several devices: cuda:0, cpu
rank: query, key and value need one rank, 2 or more; got 4, 3 and 4 dimensions
shapes: query [2, 16, 4096, 128], key [2, 16, 4096, 64] and value [2, 16, 4096, 128] do not fit: key needs the query's head_dim, value the key's length
shapes: query [2, 16, 4096, 128], key [2, 16, 4096, 128] and value [2, 16, 4095, 128] do not fit: key needs the query's head_dim, value the key's length
batch: batch and heads of query [2, 16], key [2, 4] and value [2, 4] do not broadcast (enable_gqa=True shares key and value heads)
kv heads: enable_gqa with 16 query heads, 3 key heads and 3 value heads: key and value need one number that divides the query's
mask and is_causal: attn_mask is given together with is_causal=True, which is stock's to judge
mask dtype: attn_mask is int32; allowed: bool, float32, bfloat16
mask dtype: attn_mask is float16; allowed: bool, float32, bfloat16
mask shape: attn_mask [4, 1, 4096, 4096] does not broadcast to the scores of query [2, 16, 4096, 128] and key [2, 16, 4096, 128]
mask shape: attn_mask [4096] does not broadcast to the scores of query [2, 16, 4096, 128] and key [2, 16, 4096, 128]
dropout_p: dropout_p 1.5 is not between 0 and 1
scale: scale nan is not a finite number""",  # noqa: E501
        )

    def test_why_the_cuda_backend_refuses(self):
        dense, strides = problem(), expanded_strides
        bias, wide = problem(mask="float"), problem((2, 16, 4096, 256), mask="float")
        self.assertExpectedInline(
            "\n".join(
                self.refusal(call, "cuda")
                for call in (
                    problem(gpu="cpu"),
                    problem(gpu=A100),
                    problem(gpu=AMD),
                    problem(gpu="Unknown", architecture="sm_100"),
                    changed(dense, no_compiler="the package cuda-bindings is not installed"),
                    problem(dtype=torch.float32),
                    changed(bias, mask=dataclasses.replace(bias.mask, stride=(1, 1, 1, 4096))),
                    changed(bias, mask=dataclasses.replace(bias.mask, stride=(4096 * 4100, 4100 * 4096, 4100, 1))),
                    changed(bias, mask=dataclasses.replace(bias.mask, shape=(2, 1, 4096, 1))),
                    changed(wide, mask=dataclasses.replace(wide.mask, dtype=torch.float32)),
                    problem(mask="bool", is_causal=True),
                    problem(mask="bool", dropout_p=0.1),
                    problem(mask="float", dropout_p=0.1, training=True),
                    problem((2, 16, 4096, 136), mask="bool", dropout_p=0.1, training=True),
                    problem((2, 16, 4096, 256), dropout_p=0.1),
                    problem(scale=-1.0),
                    problem(scale=0.0),
                    problem((2, 16, 4096, 520)),
                    problem((2, 16, 4096, 264), mask="bool"),
                    problem((2, 16, 4096, 512), head_dim_v=256),
                    problem((2, 16, 4096, 4)),
                    problem((2, 16, 4096, 36)),
                    problem(head_dim_v=64),
                    problem((1, 1, 16, 128), seqlen_k=2**18 + 1),
                    changed(dense, aligned=False),
                    changed(dense, key_shape=(1, 16, 4096, 128)),
                    changed(dense, query_shape=(2, 1, 4096, 128)),
                    changed(dense, value_shape=(2, 1, 4096, 128)),
                    changed(dense, query_stride=strides((2, 1, 4096, 128), 1)),
                    changed(dense, key_stride=strides((2, 1, 4096, 128), 1)),
                    changed(dense, value_stride=strides((1, 16, 4096, 128), 0)),
                    changed(dense, sdp_backends=frozenset({"cudnn"})),
                    changed(dense, transforms=True),
                    dense,
                )
            ),
            """\
device: the tensors are on cpu; the cuda backend runs on NVIDIA GPUs
architecture: NVIDIA A100-SXM4-80GB is sm_80; the cuda backend needs compute capability 9.0 (sm_90: H100, H200, H20, GH200)
architecture: AMD Instinct MI300X is gfx942; the cuda backend needs compute capability 9.0 (sm_90: H100, H200, H20, GH200)
architecture: Unknown is sm_100; the cuda backend needs compute capability 9.0 (sm_90: H100, H200, H20, GH200)
compiler: the cuda backend's kernels cannot be compiled here: the package cuda-bindings is not installed
dtype: float32 is not supported by the cuda backend (float16, bfloat16)
attn_mask: attn_mask [2, 1, 4096, 4096] of bfloat16 has strides [1, 1, 1, 4096]; the cuda backend takes float masks whose last dimension is that of the keys and dense, with all other strides multiples of 16 bytes, and all bool masks
attn_mask: attn_mask [2, 1, 4096, 4096] of bfloat16 has strides [16793600, 16793600, 4100, 1]; the cuda backend takes float masks whose last dimension is that of the keys and dense, with all other strides multiples of 16 bytes, and all bool masks
attn_mask: attn_mask [2, 1, 4096, 1] of bfloat16 has strides [16777216, 16777216, 4096, 1]; the cuda backend takes float masks whose last dimension is that of the keys and dense, with all other strides multiples of 16 bytes, and all bool masks
float32 attn_mask: attn_mask is float32 with head_dim 256, which the cuda backend takes up to 192
mask and is_causal: attn_mask is given together with is_causal=True, which is stock's to judge
dropout: dropout_p 0.1 with attn_mask is supported by the cuda backend in training alone, with bool masks and up to a head_dim of 128
dropout: dropout_p 0.1 with attn_mask is supported by the cuda backend in training alone, with bool masks and up to a head_dim of 128
dropout: dropout_p 0.1 with attn_mask is supported by the cuda backend in training alone, with bool masks and up to a head_dim of 128
dropout head_dim: dropout_p 0.1 with head_dim 256, which the cuda backend takes up to 192
positive scale: scale -1.0 is not supported by the cuda backend (a positive number)
positive scale: scale 0.0 is not supported by the cuda backend (a positive number)
head_dim: head_dim 520 with value head_dim 520 is not supported by the cuda backend (equal, 8 to 512; or 192 with 128)
wide head_dim: attn_mask or dropout_p with head_dim 264, which the cuda backend takes up to 256
head_dim: head_dim 512 with value head_dim 256 is not supported by the cuda backend (equal, 8 to 512; or 192 with 128)
head_dim: head_dim 4 with value head_dim 4 is not supported by the cuda backend (equal, 8 to 512; or 192 with 128)
head_dim multiple: head_dim 36 is no multiple of 8, as the cuda backend needs
head_dim: head_dim 128 with value head_dim 64 is not supported by the cuda backend (equal, 8 to 512; or 192 with 128)
seqlen_k: 262145 keys are more than the cuda backend adds up accurately (largest: 262144)
alignment: the cuda backend needs pointers and strides of query, key and value that are multiples of 16 bytes, and a dense last dimension
batch and heads: batch and heads of query [2, 16], key [1, 16] and value [2, 16] broadcast, which the cuda backend does not do
batch and heads: batch and heads of query [2, 1], key [2, 16] and value [2, 16] broadcast, which the cuda backend does not do
batch and heads: batch and heads of query [2, 16], key [2, 16] and value [2, 1] broadcast, which the cuda backend does not do
expanded: dimension 1 of query is expanded (its stride is 0), which the cuda backend's copies cannot walk
expanded: dimension 1 of key is expanded (its stride is 0), which the cuda backend's copies cannot walk
expanded: dimension 0 of value is expanded (its stride is 0), which the cuda backend's copies cannot walk
sdpa_kernel: torch.nn.attention.sdpa_kernel (or torch.backends.cuda) allows cudnn here; torch_flashbackend counts as FLASH_ATTENTION, which is not among these
transform: a torch.func transform or forward-mode AD is active, which works on stock's operations
policy: no measurements for NVIDIA H200""",  # noqa: E501
        )

    def test_what_the_cuda_backend_takes(self):
        def takes(call):
            return first_failure(call, "cuda", automatic=False) is None

        for head_dim in range(8, 257, 8):
            self.assertTrue(takes(problem((2, 16, 4096, head_dim))))
        self.assertTrue(takes(problem(dtype=torch.float16, training=True, is_causal=True, scale=0.3)))
        self.assertTrue(takes(problem(mask="bool", training=True)))
        self.assertTrue(takes(problem(mask="float_grad", training=True)))
        self.assertTrue(takes(problem(dropout_p=0.1, training=True)))
        self.assertTrue(takes(problem((1, 1, 1, 128), seqlen_k=1000, is_causal=True)))
        self.assertTrue(takes(problem((1, 1, 16, 128), seqlen_k=2**18)))
        self.assertTrue(takes(problem((2, 16, 64, 192), head_dim_v=128)))
        self.assertTrue(takes(problem(kv_heads=4)))
        self.assertTrue(takes(problem((16, 64, 128))))
        self.assertTrue(takes(problem((64, 128))))
        self.assertTrue(takes(problem((2, 3, 4, 64, 128))))
        # One head of keys and values, by its shape or by a stride of zero.
        one = (2, 1, 4096, 128)
        self.assertTrue(takes(changed(problem(), key_shape=one, value_shape=one)))
        expanded = expanded_strides(one, 1)
        self.assertTrue(takes(changed(problem(), key_stride=expanded, value_stride=expanded)))
        self.assertTrue(takes(problem(gpu="NVIDIA H100 PCIe")))

    def test_a_choice_by_hand_skips_the_measurements_only(self):
        dense = problem()
        self.assertEqual(decide(dense).backend, "stock")
        taken = decide(dense, ("triton", "stock"))
        self.assertEqual((taken.backend, taken.reason), ("triton", "asked for"))
        flash_off = changed(dense, sdp_backends=frozenset({"cudnn"}))
        self.assertEqual(decide(flash_off, ("triton", "stock")).backend, "stock")
        self.assertEqual(decide(problem(gpu="cpu"), ("triton", "math", "stock")).backend, "math")
        self.assertEqual(decide(problem(dtype=torch.float64), ("triton", "math")).backend, "math")

    def test_refusal_by_all_is_an_error_that_names_each_condition(self):
        with self.assertRaises(RuntimeError) as caught:
            decide(changed(problem((2, 16, 64, 600)), dropout_p=2.0), ("triton", "math"))
        self.assertExpectedInline(
            str(caught.exception),
            """\
no backend among triton, math takes this call (query [2, 16, 64, 600] bfloat16, dropout_p 2 on NVIDIA H200):
  triton: dropout_p 2.0 is not between 0 and 1
  math: dropout_p 2.0 is not between 0 and 1
With "stock" among them, PyTorch would run what the others do not take.""",
        )
        with self.assertRaisesRegex(ValueError, "there is no backend 'cudnn'"):
            decide(problem(), ("cudnn",))

    def test_broadcasting_as_in_the_math_path(self):
        def takes(query, key, value, mask=None, **kwargs):
            call = changed(problem(query), query_shape=query, key_shape=key, value_shape=value, **kwargs)
            if mask is not None:
                call = changed(call, mask=MaskInfo(torch.bool, mask, (1,) * len(mask), False, "cuda"))
            return first_failure(call, "triton", automatic=False) is None

        q = (2, 4, 8, 16)
        self.assertTrue(takes(q, (1, 4, 8, 16), (2, 1, 8, 16)))
        self.assertTrue(takes((1, 4, 8, 16), q, q))
        self.assertTrue(takes((3, 2, 4, 8, 16), (1, 2, 4, 8, 16), (3, 1, 4, 8, 16), (3, 1, 1, 8, 8)))
        self.assertTrue(takes((8, 16), (9, 16), (9, 16), (8, 9)))
        self.assertTrue(takes(q, (2, 2, 8, 16), (2, 2, 8, 16), (2, 4, 8, 1), enable_gqa=True))
        self.assertTrue(takes(q, q, q, (4, 8, 8)))
        self.assertFalse(takes(q, (2, 2, 8, 16), (2, 2, 8, 16)))
        self.assertFalse(takes(q, (2, 2, 8, 16), (2, 1, 8, 16), enable_gqa=True))
        self.assertFalse(takes((8, 16), (8, 16), (8, 16), enable_gqa=True))
        # The mask must fit the scores, which do not have the value's batch.
        self.assertFalse(takes((1, 4, 8, 16), (1, 4, 8, 16), q, (2, 1, 8, 8)))
        self.assertFalse(takes(q, q, q, (1, 2, 4, 8, 8)))
        self.assertFalse(takes(q, q, q, (2, 4, 8, 7)))

    def test_transforms_matter_above_autograd_only(self):
        below = changed(problem(mask="bool"), transforms=True, entry="_scaled_dot_product_efficient_attention")
        self.assertEqual(decide(below).backend, "triton")

    def test_the_speed_constraint_is_the_last_one(self):
        self.assertEqual(BACKENDS["cuda"].constraints[-1].name, "policy")
        self.assertEqual(BACKENDS["triton"].constraints[-1].name, "policy")
        self.assertEqual(tuple(BACKENDS), ("cuda", "triton", "math", "stock"))
        self.assertEqual(AUTO, ("cuda", "triton", "stock"))
        for backend in BACKENDS.values():
            names = [constraint.name for constraint in backend.constraints]
            self.assertEqual(len(names), len(set(names)))
