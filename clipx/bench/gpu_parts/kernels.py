"""Operations of a step by themselves: matrix products, attention, packed texts, patches, copies, AdamW.

Shape suffixes: T tokens, I and O widths of a product; b images or texts, L length, H heads, E width of a head.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipx.bench.gpu_parts.report import Report, Sizes, milliseconds
from clipx.model.varlen import varlen_attention

_HEAD = 64
_MEAN_TOKENS = 20


def run(sizes: Sizes, report: Report) -> None:
    torch.manual_seed(sizes.seed)
    for part in (_products, _attention, _packed, patches, _copies, _optimizer):
        part(sizes, report)


def _random(sizes: Sizes, *shape: int) -> Tensor:
    return torch.randn(*shape, device=sizes.place, dtype=torch.bfloat16)


def _products(sizes: Sizes, report: Report) -> None:
    """Measures the products of a block: forward, gradient of the inputs, gradient of the weights."""
    full = ((512, 4096 * _MEAN_TOKENS), (768, 1024 * 197), (1024, 512 * 257))
    for width, tokens in sizes.pick(full, ((16, 64),)):
        for name, outs, ins in (("qkv", 3, 1), ("proj", 1, 1), ("fc1", 4, 1), ("fc2", 1, 4)):
            x_TI, g_TO = _random(sizes, tokens, ins * width), _random(sizes, tokens, outs * width)
            weight_OI = _random(sizes, outs * width, ins * width)
            calls: dict[str, Callable[[], Tensor]] = {
                "forward": partial(torch.matmul, x_TI, weight_OI.T),
                "inputs": partial(torch.matmul, g_TO, weight_OI),
                "weights": partial(torch.matmul, g_TO.T, x_TI),
            }
            for which, call in calls.items():
                flops = 2 * tokens * outs * ins * width**2
                took = milliseconds(call, sizes.place)
                report.number(f"product {width} {name} {which}", flops / took / 1e9, "TFLOP/s")


def _attention(sizes: Sizes, report: Report) -> None:
    """Measures forward and backward of attention by torch's choice and by each of its implementations."""
    full = (("B/32", 4096, 50, 12, False), ("B/16", 1024, 197, 12, False), ("L/14", 512, 257, 16, False),
            ("padded text", 4096, 77, 8, True))  # fmt: skip
    chosen = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
              "efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip
    for what, texts, length, heads, causal in sizes.pick(full, (("B/32", 2, 5, 2, False),)):
        qkv = _random(sizes, texts, length, 3, heads, _HEAD).requires_grad_()

        def both(qkv: Tensor = qkv, causal: bool = causal) -> None:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            out.backward(out.detach())

        report.number(f"attention {what} default", milliseconds(both, sizes.place), "ms")
        for name, backend in chosen.items():
            try:
                with sdpa_kernel(backend):
                    report.number(f"attention {what} {name}", milliseconds(both, sizes.place), "ms")
            except RuntimeError as error:
                report.failed(f"attention {what} {name}", error)
        qkv.grad = None


def _packed(sizes: Sizes, report: Report) -> None:
    """Measures attention of packed texts, and spreading them to the context length and back."""
    texts, context, heads = sizes.pick((4096, 77, 8), (4, 9, 2))
    width = heads * _HEAD
    lengths = torch.randint(2, 2 * min(_MEAN_TOKENS, context // 2), (texts,), device=sizes.place)
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    tokens = int(ends[-1])
    qkv = _random(sizes, tokens, 3, heads, _HEAD).requires_grad_()

    def varlen() -> None:
        out = varlen_attention(qkv, ends, context)
        out.backward(out.detach())

    try:
        report.number("attention text varlen", milliseconds(varlen, sizes.place), "ms")
    except Exception as error:
        report.failed("attention text varlen", error)
    here = torch.arange(context, device=sizes.place) < lengths[:, None]
    place_T = torch.arange(texts * context, device=sizes.place).view(texts, context)[here]
    x_TW = _random(sizes, len(place_T), 3 * width).requires_grad_()

    def spread() -> None:
        out = x_TW.new_zeros(texts * context, 3 * width).index_copy(0, place_T, x_TW)
        out.index_select(0, place_T).sum().backward()

    report.number("spread and gather", milliseconds(spread, sizes.place), "ms")


def patches(sizes: Sizes, report: Report) -> None:
    """Measures normalisation and patch embedding, as a convolution and as one product, with the weight's gradient."""
    images, side = sizes.pick((1024, 224), (2, 32))
    # With symbolic sizes, the default from the second size on, other kernels than those of a model would be timed.
    cut = torch.compile(_cut, dynamic=False, backend=sizes.pick("inductor", "eager"))
    for patch, width in sizes.pick(((32, 768), (16, 768), (14, 1024)), ((16, 8), (8, 8), (4, 8))):
        image = torch.randint(0, 256, (images, side, side, 3), device=sizes.place, dtype=torch.uint8)
        image_b3SS, mean = image.permute(0, 3, 1, 2), torch.rand(3, 1, 1, device=sizes.place)
        conv = torch.nn.Conv2d(3, width, patch, patch, device=sizes.place).to(memory_format=torch.channels_last)

        def convolved(image: Tensor = image_b3SS, mean: Tensor = mean, conv: torch.nn.Module = conv) -> None:
            with torch.autocast(sizes.device, torch.bfloat16):
                out = conv((image.float() / 255 - mean) / (mean + 0.2))
            out.backward(out.detach())

        for benchmark in (False, True):
            torch.backends.cudnn.benchmark = benchmark
            kind = "convolution" if not benchmark else "convolution cudnn.benchmark"
            report.number(f"patches {patch} {kind}", milliseconds(convolved, sizes.place), "ms")
        weight = conv.weight.detach().permute(0, 2, 3, 1).reshape(width, -1).bfloat16().requires_grad_()

        def product(inputs: tuple[Tensor, Tensor, int] = (image_b3SS, mean, patch), weight: Tensor = weight) -> None:
            out = cut(*inputs) @ weight.T
            out.backward(out.detach())

        report.number(f"patches {patch} product", milliseconds(product, sizes.place), "ms")


def _cut(image_b3SS: Tensor, mean: Tensor, patch: int) -> Tensor:
    """Returns normalised patches as rows."""
    x = ((image_b3SS.float() / 255 - mean) / (mean + 0.2)).bfloat16().permute(0, 2, 3, 1)
    b, n = len(x), x.shape[1] // patch
    return x.reshape(b, n, patch, n, patch, 3).permute(0, 1, 3, 2, 4, 5).reshape(b * n * n, -1)


def _copies(sizes: Sizes, report: Report) -> None:
    """Measures pinning, the copy into pinned memory, and that to the device, of a batch of 4096 images."""
    host = torch.empty(sizes.pick(4096 * 150_528, 4096), dtype=torch.uint8)
    if sizes.device != "cuda":
        report.number("copy to the device", milliseconds(host.clone, sizes.place), "ms")
        return
    pinned = host.pin_memory()
    begin = time.perf_counter()
    pinned.copy_(host)
    report.number("copy into pinned memory", 1e3 * (time.perf_counter() - begin), "ms")
    there = torch.empty_like(host, device=sizes.place)
    report.number("copy to the device", milliseconds(lambda: there.copy_(pinned, non_blocking=True), sizes.place), "ms")
    source = torch.empty(2**32, dtype=torch.uint8, device=sizes.place)
    report.number("copy on the device", 2e-9 * 2**32 / milliseconds(source.clone, sizes.place), "TB/s")
    begin = time.perf_counter()
    torch.empty(5_200_000_000, dtype=torch.uint8, pin_memory=True)
    report.number("pin 5.2 GB", time.perf_counter() - begin, "s")


def _optimizer(sizes: Sizes, report: Report) -> None:
    count, side = sizes.pick((151, 1024), (3, 4))
    weights = [torch.randn(side, side, device=sizes.place, requires_grad=True) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    grads = [weight.grad for weight in weights if weight.grad is not None]
    adam = torch.optim.AdamW(weights, fused=True)
    report.number("AdamW fused, 158 M", milliseconds(adam.step, sizes.place), "ms")
    norm = milliseconds(lambda: torch.nn.utils.get_total_norm(grads), sizes.place)
    report.number("gradient norm, 158 M", norm, "ms")
