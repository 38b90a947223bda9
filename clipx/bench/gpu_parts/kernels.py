"""Operations of a step by themselves: matrix products, attention, packed texts, patches, copies.

Shape suffixes: T tokens, I and O widths of a product; b images or texts, L length, H heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from clipx.bench.gpu_parts.report import Report, Sizes, milliseconds
from clipx.model.varlen import varlen_attention

_HEAD = 64
_MEAN_TOKENS = 20


def run(sizes: Sizes, report: Report) -> None:
    torch.manual_seed(sizes.seed)
    for part in (_products, _attention, _packed, patches, _copies):
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
    """Measures forward and backward of attention of the image towers."""
    full = (("B/32", 4096, 50, 12), ("B/16", 1024, 197, 12), ("L/14", 512, 257, 16))
    for what, images, length, heads in sizes.pick(full, (("B/32", 2, 5, 2),)):
        qkv = _random(sizes, images, length, 3, heads, _HEAD).requires_grad_()

        def both(qkv: Tensor = qkv) -> None:
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            out = F.scaled_dot_product_attention(q, k, v)
            out.backward(out.detach())

        report.number(f"attention {what} default", milliseconds(both, sizes.place), "ms")


def _packed(sizes: Sizes, report: Report) -> None:
    """Measures forward and backward of attention of packed texts."""
    texts, context, heads = sizes.pick((4096, 77, 8), (4, 9, 2))
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
    """Measures the copy of a batch of 4096 images to the device, and copies on the device."""
    host = torch.empty(sizes.pick(4096 * 150_528, 4096), dtype=torch.uint8)
    if sizes.device != "cuda":
        report.number("copy to the device", milliseconds(host.clone, sizes.place), "ms")
        return
    pinned = host.pin_memory()
    there = torch.empty_like(host, device=sizes.place)
    report.number("copy to the device", milliseconds(lambda: there.copy_(pinned, non_blocking=True), sizes.place), "ms")
    source = torch.empty(2**32, dtype=torch.uint8, device=sizes.place)
    report.number("copy on the device", 2e-9 * 2**32 / milliseconds(source.clone, sizes.place), "TB/s")
