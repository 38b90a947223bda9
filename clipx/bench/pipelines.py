"""Measuring processes of the loader benchmark, each of which runs one pipeline over photographs in shards.

The functions of CONTESTANTS return items per second.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_all_start_methods, get_context, set_start_method
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from clipx.bench.shards import pattern
from clipx.data.batch import Batch
from clipx.data.loader import TrainBatches, train_loader, used_mask
from clipx.data.order import Order
from clipx.data.shards.shards import Shards
from clipx.data.shards.urls import expand
from clipx.data.source import Source
from clipx.data.spec import Dataset, open_data, training_order
from clipx.data.transform import random_box
from clipx.data.views import ImageView, view_of
from clipx.distributed.comm import Comm
from clipx.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec

_SIZE, _CONTEXT, _CROP, _PREFETCH = 224, 77, (0.9, 1.0), 2
_COLOURS = ("red", "green", "white", "wooden", "stone")
_CAPTION = "a photo of a small {} house beside the lake on a cloudy morning, with number {} on its door"


def caption(seed: int, i: int) -> str:
    """Returns the caption of sample i. Its length does not vary, as that of the captions of `shards` does."""
    return _CAPTION.format(_COLOURS[i % len(_COLOURS)], i)


def _source(folder: str) -> Source:
    os.environ["CLIPX_CACHE"] = f"{folder}/cache"  # a benchmark must leave nothing in the user's cache
    return Shards.open(expand(f"{folder}/*.tar", "shards"), "txt", None)


def training_stream(folder: str, seed: int, on_device: bool = False) -> TrainBatches:
    """Returns the training stream of a folder of photographs: crops of 224 pixels. `on_device`: data.decode=gpu."""
    source = _source(folder)
    order = Order(source.sizes, seed, 200_000)
    view = ImageView(_SIZE, _CROP, 10**8, on_device=on_device)
    return TrainBatches(source, order, view, Tokenizer(_CONTEXT), seed)


def fork_workers() -> None:
    """Makes the loader fork its workers as in a training process. A spawned process would spawn them."""
    if "fork" in get_all_start_methods():
        set_start_method("fork", force=True)


def _per_second(batches: Iterable[object], batch: int, count: int, ready: int) -> float:
    """Returns the images per second over `count` batches. Skips the batches that were `ready` with the first one."""
    stream = iter(batches)
    for _ in range(ready + 1):
        next(stream)
    start = time.perf_counter()
    for _ in range(count):
        next(stream)
    return batch * count / (time.perf_counter() - start)


def _loader(stream: TrainBatches, batch: int, workers: int, prefetch: int) -> Iterable[Batch]:
    """Builds the endless training loader of one rank."""
    return train_loader(
        stream.source,
        stream.order,
        stream.view,
        stream.tokenizer,
        seed=stream.seed,
        samples=range(10**6 * batch),
        batch=batch,
        rank=0,
        world=1,
        workers=workers,
        prefetch=prefetch,
        pin=False,
        mask=stream.mask,
    )


def clipx_processes(comm: Comm, folder: str, batch: int, workers: int, count: int, seed: int) -> float:
    """Measures clipx's loader with worker processes."""
    fork_workers()
    return _per_second(
        _loader(training_stream(folder, seed), batch, workers, _PREFETCH), batch, count, workers * _PREFETCH
    )


def encoded_batches(folder: str, batch: int, workers: int, seed: int) -> Iterator[Batch]:
    """Returns the endless training batches of one rank with data.decode=gpu. `Batch.to` decodes them."""
    return iter(_loader(training_stream(folder, seed, on_device=True), batch, workers, _PREFETCH))


def clipx_threads(comm: Comm, folder: str, batch: int, workers: int, count: int, seed: int) -> float:
    """Measures the same batches from threads: the decoder and the filter release the GIL, the rest does not."""
    torch.set_num_threads(1)
    stream = training_stream(folder, seed)

    def make(positions: range) -> Batch:
        batch = stream[positions]
        if isinstance(batch, Batch):
            return batch
        raise batch

    return _in_threads(make, batch, workers, count)


def _in_threads(make: Callable[[range], Batch], batch: int, workers: int, count: int) -> float:
    def batches(pool: ThreadPoolExecutor) -> Iterator[Batch]:
        positions = (range(i * batch, (i + 1) * batch) for i in itertools.count())
        waiting = [pool.submit(make, next(positions)) for _ in range(workers * (_PREFETCH + 1))]
        while True:
            ready = waiting.pop(0).result()
            waiting.append(pool.submit(make, next(positions)))
            yield ready

    with ThreadPoolExecutor(workers) as pool:
        rate = _per_second(batches(pool), batch, count, workers * _PREFETCH)
        pool.shutdown(cancel_futures=True)
    return rate


def spdl_threads(comm: Comm, folder: str, batch: int, workers: int, count: int, seed: int) -> float:
    """Measures spdl with clipx's samples, boxes and tokens. spdl decodes, crops, resizes and batches without the GIL.

    A thread makes a whole batch, as clipx's threads do: spdl's Pipeline, with a task per image, takes a fifth more CPU.
    """
    import spdl.io

    torch.set_num_threads(1)
    stream = training_stream(folder, seed)

    def make(positions: range) -> Batch:
        frames, captions, indices = [], [], [stream.order(position) for position in positions]
        for position, index in zip(positions, indices, strict=True):
            rng = random.Random(f"{seed}/{position}")
            sample = stream.source.read(index)
            frames.append(spdl_frame(sample.image, _SIZE, rng))
            captions.append(rng.choice(sample.captions))
        image_bSS3 = spdl.io.to_torch(spdl.io.convert_frames(frames))
        return Batch(image_bSS3.permute(0, 3, 1, 2), stream.tokenizer(captions), torch.tensor(indices))

    return _in_threads(make, batch, workers, count)


def spdl_frame(encoded: bytes, size: int, rng: random.Random) -> Any:
    """Returns the result of `train_transform` as a frame of spdl. FFmpeg resizes in YCbCr, its fastest path: bicubic,
    but with different pixels."""
    import spdl.io

    packets = spdl.io.demux_image(encoded)
    left, top, right, bottom = random_box((packets.codec.width, packets.codec.height), _CROP, rng)
    cut = f"crop={right - left}:{bottom - top}:{left}:{top}:exact=1"
    graph = f"{cut},scale={size}:{size}:flags=bicubic,format=pix_fmts=rgb24"
    return spdl.io.decode_packets(packets, filter_desc=graph)


def without_spdl() -> str | None:
    """Returns the reason why spdl cannot be measured on this machine, or None."""
    try:
        from spdl.io.utils import get_ffmpeg_versions

        get_ffmpeg_versions()
    except ImportError:
        return "spdl is not installed"
    except RuntimeError:
        return "spdl is installed, but not the shared libraries of FFmpeg that it needs"
    return None


def open_clip(comm: Comm, folder: str, batch: int, workers: int, count: int, seed: int) -> float:
    """Measures open_clip's pipeline as its trainer builds it, endless."""
    fork_workers()
    loader = open_clip_loader(pattern(Path(folder)), _SIZE, _CONTEXT, batch, workers, seed)
    return _per_second(loader, batch, count, workers * _PREFETCH)


def open_clip_loader(shards: str, size: int, context: int, batch: int, workers: int, seed: int) -> Iterable[Any]:
    """Builds the WebDataset loader of open_clip's trainer, endless: batches of (images, texts)."""
    import open_clip as package
    from open_clip_train import data as its_data

    # open_clip was written for webdataset 0.2, which yields no end-of-file marker after the last file of a tar.
    if not isinstance(its_data.tar_file_expander, partial):
        its_data.tar_file_expander = partial(its_data.tar_file_expander, eof_value=None)
    args = SimpleNamespace(
        train_data=shards,
        dataset_resampled=True,
        train_num_samples=10**6 * batch,
        train_data_upsampling_factors=None,
        seed=seed,
        workers=workers,
        world_size=1,
        batch_size=batch,
    )
    transform = package.image_transform(size, is_train=True)
    tokenizer = package.get_tokenizer("ViT-B-32", context_length=context)
    loader: Iterable[Any] = its_data.get_wds_dataset(args, transform, is_train=True, tokenizer=tokenizer).dataloader
    return loader


def decode_bound(comm: Comm, folder: str, batch: int, workers: int, count: int, seed: int) -> float:
    """Measures libjpeg-turbo on whole images in memory, in `workers` processes, without reading, cropping or
    sending."""
    return _in_processes(workers, partial(_decode, folder, batch * count // workers))


def tokens_bound(comm: Comm, folder: str, batch: int, workers: int, count: int, seed: int) -> float:
    """Measures clipx's tokenizer alone, in `workers` processes."""
    return _in_processes(workers, partial(_tokenise, batch, batch * count * 8 // workers))


def _in_processes(workers: int, work: Callable[[], tuple[int, float, float]]) -> float:
    """Returns the sum over the processes of items per second."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        done = [future.result() for future in [pool.submit(work) for _ in range(workers)]]
    return sum(items / (end - start) for items, start, end in done)


def _decode(folder: str, count: int) -> tuple[int, float, float]:
    import simplejpeg

    source = _source(folder)
    images = [source.read(i).image for i in range(min(200, sum(source.sizes)))]
    simplejpeg.decode_jpeg(images[0])
    start = time.time()
    for i in range(count):
        simplejpeg.decode_jpeg(images[i % len(images)])
    return count, start, time.time()


def _tokenise(batch: int, count: int) -> tuple[int, float, float]:
    tokenizer = Tokenizer(_CONTEXT)
    texts = [caption(0, i) for i in range(batch)]
    tokenizer(texts)
    start = time.time()
    for _ in range(count // batch):
        tokenizer(texts)
    return count // batch * batch, start, time.time()


CONTESTANTS: Mapping[str, Callable[..., float]] = {
    "clipx": clipx_processes,
    "threads": clipx_threads,
    "spdl": spdl_threads,
    "open_clip": open_clip,
    "decode": decode_bound,
    "tokens": tokens_bound,
}


def stream_of_run(run_dir: Path) -> tuple[RunSpec, Dataset, TrainBatches]:
    """Returns the spec, the data set and the training stream of a run directory, for one rank."""
    from clipx.trainer.saved_run import load_run

    spec = load_run(run_dir)
    dataset = open_data(spec.data)
    order = training_order(spec.data, dataset, spec.seed, ranks=1)
    view = view_of(spec.model.image, spec.data)
    tokenizer, mask = spec.model.text.build_tokenizer(), used_mask(spec.data.caption_mask)
    return spec, dataset, TrainBatches(dataset.train, order, view, tokenizer, spec.seed, mask=mask)


def rate_of_run(comm: Comm, run_dir: str, count: int) -> float:
    """Measures the samples per second of a run's loader for one rank, without training."""
    fork_workers()
    spec, dataset, stream = stream_of_run(Path(run_dir))
    batch = min(spec.data.batch_size, sum(dataset.train.sizes))
    workers = spec.data.loader_processes()
    loader = _loader(stream, batch, workers, spec.data.prefetch)
    return _per_second(loader, batch, count, workers * spec.data.prefetch)
