"""JPEG decoding on the device (data.decode=gpu): nvJPEG through torchvision, then crops and resizing in batches.

Shape suffixes: n images, H and W largest height and width of their crops, S side of the pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import simplejpeg
import torch
from torch import Tensor

from clipx.data.images import Draw, PixelReader
from clipx.data.inputs import Inputs
from clipx.errors import ConfigError, DataError
from clipx.extra.gpu_decode.reader import EncodedImage, EncodedImages
from clipx.extra.gpu_decode.registered import GPU
from clipx.model.tower_spec import Interpolation
from clipx.model.transfer import moved

log = logging.getLogger(__name__)
T = TypeVar("T")
_File = tuple[EncodedImage, Tensor]  # image and its file

_PIXELS = 2**25  # decoded at a time: 100 MB
_NUMBERS = 2**26  # float32 in memory while crops are resized: 268 MB
_MANY = 16  # images of which damage does not explain that none is decoded


def check_device_decoding(device: torch.device) -> None:
    """Raises ConfigError if the device does not decode JPEGs."""
    GPU.check_device_type(device.type)
    file = simplejpeg.encode_jpeg(torch.full((32, 32, 3), 128, dtype=torch.uint8).numpy())
    try:
        _decode([torch.frombuffer(bytearray(file), dtype=torch.uint8)], device)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"data.decode=gpu: torchvision decodes no JPEG on {device} ({_first_line(error)}): install a torchvision "
            "with nvJPEG, or use data.decode=cpu"
        ) from None


def decode_images(encoded: EncodedImages, device: torch.device) -> Inputs:
    """Returns the pixels of all images on the device. Raises DataError."""
    reader, others = encoded.reader, [rows_nSS3.permute(0, 2, 3, 1) for rows_nSS3 in encoded.rows]
    whole_nSS3 = [torch.empty((len(encoded), *rows.shape[1:]), dtype=torch.uint8, device=device) for rows in others]
    failed: list[_File] = []
    for group in _grouped([*encoded], lambda item: item[0].width * item[0].height, _PIXELS):
        failed += _decode_group(group, whole_nSS3, reader)
    decoded = {image.row for image in encoded.images}
    places = [row for row in range(len(encoded)) if row not in decoded] + [image.row for image, _ in failed]
    again = [torch.empty((len(failed), *rows.shape[1:]), dtype=torch.uint8) for rows in others]
    for (image, file), *rows in zip(failed, *again, strict=True):
        reader.load(file.numpy().tobytes(), Draw(image.box, image.seed), *rows)
    row_n = moved(torch.tensor(places, dtype=torch.int64), device)
    for whole, *parts in zip(whole_nSS3, others, again, strict=True):
        whole.index_copy_(0, row_n, torch.cat([moved(part, device) for part in parts]))
    return Inputs(tuple(rows_nSS3.permute(0, 3, 1, 2) for rows_nSS3 in whole_nSS3))


def _decode_group(group: Sequence[_File], whole_nSS3: Sequence[Tensor], reader: PixelReader) -> list[_File]:
    """Decodes images into their rows. Returns those that the device cannot decode. Raises DataError."""
    device, size = whole_nSS3[0].device, max(reader.sizes)
    if device.type == "cuda":
        # torchvision decodes on another stream, which does not wait for earlier work on the memory it is given.
        torch.cuda.current_stream(device).synchronize()
    good: list[tuple[EncodedImage, Tensor]] = []
    failed: list[_File] = []
    for (image, file), pixels in zip(group, decode_jpegs([file for _, file in group], device), strict=True):
        left, top, right, bottom = image.box
        if pixels is not None and pixels.shape == (3, image.height, image.width):
            good.append((image, pixels[:, top:bottom, left:right]))
        else:
            failed.append((image, file))
    for some in _grouped(good, lambda item: _numbers(item[1], size), _NUMBERS):
        row_n = torch.tensor([image.row for image, _ in some], device=device)
        for whole in whole_nSS3:
            found_nSS3 = resize_crops([crop for _, crop in some], whole.shape[1], reader.interpolation)
            for (image, _), row_SS3 in zip(some, found_nSS3, strict=True):
                reader.augment(image.seed, [row_SS3], on_device=True)
            whole.index_copy_(0, row_n, found_nSS3)
    return failed


def _numbers(crop: Tensor, size: int) -> int:
    """Returns about how many numbers resize_crops has in memory for a crop."""
    height, width = crop.shape[1:]
    return 3 * (height * width + height * size + size * size) + 3 * size * (height + width)


def _grouped(items: Sequence[T], cost: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Yields the items by falling cost, in groups that cost at most `limit` if all cost as much as the first."""
    group: list[T] = []
    for item in sorted(items, key=cost, reverse=True):
        if group and cost(group[0]) * (len(group) + 1) > limit:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


# ------------------------------------------------------------------------------------------------------- decoding


def decode_jpegs(files: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """Decodes files to [3, height, width] uint8 on the device. None for each that the device cannot decode. Raises
    DataError if it can decode none of many."""
    errors: list[RuntimeError] = []
    decoded = _decode_halves(files, device, errors)
    if errors and len(errors) == len(files) >= _MANY:
        raise DataError(
            f"data.decode=gpu: {device} decoded none of {len(files)} JPEGs ({_first_line(errors[0])}): use "
            "data.decode=cpu"
        )
    return decoded


def _decode_halves(files: Sequence[Tensor], device: torch.device, errors: list[RuntimeError]) -> list[Tensor | None]:
    """Decodes each file that can be decoded, by halves: torchvision decodes no file of a list in which one fails."""
    try:
        return [*_decode(files, device)]
    except RuntimeError as error:
        if "out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from None
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the failed call may still write to memory that it has freed
        if len(files) == 1:
            log.debug("data.decode=gpu: a JPEG is read on the CPU: %s", _first_line(error))
            errors.append(error)
            return [None]
    half = len(files) // 2
    return [*_decode_halves(files[:half], device, errors), *_decode_halves(files[half:], device, errors)]


def _decode(files: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    # torchvision announces that torchcodec replaces it; torchcodec would be a further dependency.
    from torchvision.io import ImageReadMode, decode_jpeg

    decoded: list[Tensor] = decode_jpeg(list(files), mode=ImageReadMode.RGB, device=device)
    return decoded


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n", 1)[0].split())[:160]


# ------------------------------------------------------------------------------------------------------- resizing


def resize_crops(crops: Sequence[Tensor], size: int, interpolation: Interpolation = Interpolation.bicubic) -> Tensor:
    """Resizes crops [3, height, width] uint8 to rows [n, S, S, 3] with antialiasing, as `transform.resize`."""
    heights, widths = ([crop.shape[dim] for crop in crops] for dim in (1, 2))
    n, height, width = len(crops), max(heights), max(widths)
    padded_nH3W = torch.zeros((n, height, 3, width), device=crops[0].device)
    for padded_H3W, crop in zip(padded_nH3W, crops, strict=True):
        padded_H3W[: crop.shape[1], :, : crop.shape[2]] = crop.transpose(0, 1)
    kernel, device = _KERNELS[interpolation], crops[0].device
    across_nWS = _weights(widths, size, kernel, device).transpose(1, 2)
    wide = torch.bmm(padded_nH3W.view(n, height * 3, width), across_nWS)
    del padded_nH3W
    wide_nH3S = wide.round_().clamp_(0, 255).view(n, height, 3 * size)
    tall = torch.bmm(_weights(heights, size, kernel, device), wide_nH3S)
    return tall.round_().clamp_(0, 255).view(n, size, 3, size).transpose(2, 3).to(torch.uint8)


def _weights(lengths: Sequence[int], size: int, kernel: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    """Returns the weights [n, S, L] of the filter that resizes each length to `size`. L: the largest length."""
    length_n11 = torch.tensor(lengths, device=device).view(-1, 1, 1)
    scale_n11 = length_n11 / size
    center_nS1 = scale_n11 * (torch.arange(size, device=device) + 0.5)[:, None]
    place_L = torch.arange(max(lengths), device=device)
    distance_nSL = ((place_L + 0.5 - center_nS1) / scale_n11.clamp(min=1)).abs_()
    weight_nSL = kernel(distance_nSL).mul_(place_L < length_n11)
    return weight_nSL / weight_nSL.sum(2, keepdim=True)


def _cubic(x: Tensor, a: float = -0.5) -> Tensor:
    """Returns the cubic convolution kernel at distances x ≥ 0: of Pillow, and of torch with antialiasing."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _triangle(x: Tensor) -> Tensor:
    """Returns the kernel of bilinear interpolation at distances x ≥ 0."""
    return (1 - x).clamp(min=0)


_KERNELS = {Interpolation.bicubic: _cubic, Interpolation.bilinear: _triangle}
