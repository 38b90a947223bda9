"""JPEG decoding on the device (data.decode=gpu): nvJPEG through torchvision, then crops and resizing in batches.

Shape suffixes: b samples of a rank, n images, H and W largest height and width of their crops, S side of the pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import simplejpeg
import torch
from torch import Tensor

from clipx.data.batch import Batch
from clipx.data.encoded import LARGEST, EncodedImage
from clipx.data.spec import check_decodes
from clipx.errors import ConfigError, DataError
from clipx.model.tower_spec import Interpolation

if TYPE_CHECKING:
    from clipx.data.loader import TrainBatches

log = logging.getLogger(__name__)
T = TypeVar("T")

_PIXELS = 2**25  # decoded at a time: 100 MB
_NUMBERS = 2**26  # float32 in memory while crops are resized: 268 MB
_MANY = 16  # images of which damage does not explain that none is decoded


def check_device_decoding(device: torch.device) -> None:
    """Raises ConfigError if the device does not decode JPEGs."""
    check_decodes(device.type)
    file = simplejpeg.encode_jpeg(torch.full((32, 32, 3), 128, dtype=torch.uint8).numpy())
    try:
        _decode([torch.frombuffer(bytearray(file), dtype=torch.uint8)], device)
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"data.decode=gpu: torchvision decodes no JPEG on {device} ({_first_line(error)}): install a torchvision "
            "with nvJPEG, or use data.decode=cpu"
        ) from None


def note_few(batch: Batch, rank: int) -> None:
    """Logs on rank 0 if the device decodes less than half of the images of a batch."""
    count, total = sum(len(images.table_m11) for images in batch.encoded), len(batch.index)
    if rank == 0 and 2 * count < total:
        log.info(
            "data.decode=gpu: the device decodes %d of the %d images of a batch; loader processes decode the others, "
            "which are no upright baseline JPEGs of at most %d pixels",
            count,
            total,
            LARGEST,
        )


@dataclass(frozen=True, slots=True)
class DeviceDecoder:
    """Decodes the encoded images of batches on the device. `stream`: the samples of the batches, decoded on the CPU.

    An image that the device cannot decode is decoded on the CPU. It is whole: see `device_crop`.
    """

    stream: TrainBatches
    sizes: Sequence[int]
    """Sides of the images in pixels: the model's, and that of the second view if it is another."""
    interpolation: Interpolation = Interpolation.bicubic

    def __call__(self, batch: Batch, device: torch.device) -> Batch:
        """Returns the batch on the device, with all images in pixels. Raises DataError.

        The host waits for the current stream, then for the decoder.
        """
        encoded = [item for images in batch.encoded for item in images]
        whole_bSS3 = [torch.empty((len(batch.index), s, s, 3), dtype=torch.uint8, device=device) for s in self.sizes]
        failed: list[tuple[EncodedImage, Tensor]] = []
        indices = batch.index.tolist()
        for group in _grouped(encoded, lambda item: item[0].width * item[0].height, _PIXELS):
            failed += self._decode(group, whole_bSS3, indices)
        on_device = {image.row for image, _ in encoded}
        rows = [row for row in range(len(batch.index)) if row not in on_device] + [image.row for image, _ in failed]
        batch = self._read_again(batch, failed, indices) if failed else batch
        batch = replace(batch, encoded=(), decoder=None).to(device)
        for whole, part in zip(whole_bSS3, batch.images, strict=True):
            whole.index_copy_(0, torch.tensor(rows, dtype=torch.int64, device=device), part.permute(0, 2, 3, 1))
        image, *others = map(self.stream.view.batch, whole_bSS3)
        return replace(batch, image=image, second_image=others[0] if others else None)

    def _decode(
        self, group: Sequence[tuple[EncodedImage, Tensor]], whole_bSS3: Sequence[Tensor], indices: Sequence[int]
    ) -> list[tuple[EncodedImage, Tensor]]:
        """Decodes images into their rows. Returns those that the device cannot decode. Raises DataError."""
        device = whole_bSS3[0].device
        if device.type == "cuda":
            # torchvision decodes on another stream, which does not wait for earlier work on the memory it is given.
            torch.cuda.current_stream(device).synchronize()
        good: list[tuple[EncodedImage, Tensor]] = []
        failed: list[tuple[EncodedImage, Tensor]] = []
        for (image, file), pixels in zip(group, decode_jpegs([file for _, file in group], device), strict=True):
            if pixels is not None and pixels.shape == (3, image.height, image.width):
                good.append((image, pixels[:, image.top : image.bottom, image.left : image.right]))
            else:
                failed.append((image, file))
        for some in _grouped(good, lambda item: self._numbers(*item[1].shape[1:]), _NUMBERS):
            rows = torch.tensor([image.row for image, _ in some], device=device)
            for whole in whole_bSS3:
                found_nSS3 = resize_crops([crop for _, crop in some], whole.shape[1], self.interpolation)
                for (image, _), row_SS3 in zip(some, found_nSS3, strict=True):
                    seed = self.stream.augment_seed(image.position, indices[image.row], image.number)
                    self.stream.view.augment(seed, row_SS3, on_device=True)
                whole.index_copy_(0, rows, found_nSS3)
        return failed

    def _numbers(self, height: int, width: int) -> int:
        """Returns about how many numbers resize_crops has in memory for a crop."""
        size = max(self.sizes)
        return 3 * (height * width + height * size + size * size) + 3 * size * (height + width)

    def _read_again(self, batch: Batch, failed: Sequence[tuple[EncodedImage, Tensor]], indices: Sequence[int]) -> Batch:
        """Returns the batch on the host, with the pixels of these images, decoded on the CPU, added."""
        view = self.stream.view
        pixels_nSS3 = [torch.empty((len(failed), size, size, 3), dtype=torch.uint8) for size in self.sizes]
        for (image, file), *outs in zip(failed, *pixels_nSS3, strict=True):
            view.load(file.numpy().tobytes(), (image.left, image.top, image.right, image.bottom), *outs)
            view.augment(self.stream.augment_seed(image.position, indices[image.row], image.number), *outs)
        image, *others = (torch.cat(pair) for pair in zip(batch.images, map(view.batch, pixels_nSS3), strict=True))
        return replace(batch, image=image, second_image=others[0] if others else None)


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
    """Decodes files to [3, height, width] uint8 on the device. None for each that the device cannot decode.

    Raises DataError if it can decode none of many.
    """
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
    """Resizes crops [3, height, width] uint8 to rows [n, S, S, 3] with antialiasing, as `transform.resize`.

    Two matrix products for all crops, which are padded to one size: a kernel for each crop takes 20 us of the host
    in Python. Each product is rounded to a level, as on the CPU.
    """
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
