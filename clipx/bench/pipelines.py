"""Training loaders of clipx and of open_clip over photographs in shards, decoding alone, and the loader of a run, in
samples per second."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_all_start_methods, get_context, set_start_method
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from clipx.bench.shards import pattern
from clipx.data.batch import Batch
from clipx.data.images import PixelReader, reader_of
from clipx.data.loader import CPU, LoaderOptions, TrainBatches, train_loader
from clipx.data.order import Order
from clipx.data.shards.shards import Shards
from clipx.data.shards.urls import expand
from clipx.data.source import Source
from clipx.data.spec import Dataset, open_data, training_order
from clipx.data.texts import TextReader, used_mask
from clipx.distributed.comm import Comm
from clipx.extra.gpu_decode.reader import EncodedReader
from clipx.model.tokenizer import Tokenizer
from clipx.processes import start_in_child

if TYPE_CHECKING:
    from clipx.trainer.spec import RunSpec

_SIZE, _CONTEXT, _CROP, _PREFETCH = 224, 77, (0.9, 1.0), 2


def _source(folder: str) -> Source:
    os.environ["CLIPX_CACHE"] = f"{folder}/cache"  # a benchmark must leave nothing in the user's cache
    return Shards.open(expand(f"{folder}/*.tar", "shards"), "txt", None)


def training_stream(folder: str, seed: int, on_device: bool = False) -> TrainBatches:
    """Returns the training stream of a folder of photographs: crops of 224 pixels. `on_device`: data.decode=gpu."""
    source = _source(folder)
    order = Order(source.sizes, seed, 200_000)
    images = PixelReader((_SIZE,), _CROP, 10**8)
    images = EncodedReader.like(images) if on_device else images
    return TrainBatches(source, order, images, TextReader(Tokenizer(_CONTEXT)), seed)


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


def _loader(
    stream: TrainBatches, batch: int, workers: int, prefetch: int, device: torch.device = CPU
) -> Iterator[Batch]:
    """Builds the endless training loader of one rank."""
    options = LoaderOptions(batch, workers=workers, prefetch=prefetch, device=device)
    return train_loader(stream, range(10**6 * batch), options)


def clipx_processes(comm: Comm, folder: str, batch: int, workers: int, count: int, seed: int) -> float:
    """Measures clipx's loader with worker processes."""
    fork_workers()
    return _per_second(
        _loader(training_stream(folder, seed), batch, workers, _PREFETCH), batch, count, workers * _PREFETCH
    )


def decoded_batches(folder: str, batch: int, workers: int, seed: int, device: torch.device) -> Iterator[Batch]:
    """Returns the endless training batches of one rank with data.decode=gpu, on the device."""
    return _loader(training_stream(folder, seed, on_device=True), batch, workers, _PREFETCH, device)


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
    decode = partial(_decode, folder, batch * count // workers)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=start_in_child) as pool:
        return sum(future.result() for future in [pool.submit(decode) for _ in range(workers)])


def _decode(folder: str, count: int) -> float:
    """Returns the images per second of one process."""
    import simplejpeg

    source = _source(folder)
    images = [source.read(i).image for i in range(min(200, sum(source.sizes)))]
    simplejpeg.decode_jpeg(images[0])
    start = time.time()
    for i in range(count):
        simplejpeg.decode_jpeg(images[i % len(images)])
    return count / (time.time() - start)


CONTESTANTS: Mapping[str, Callable[..., float]] = {
    "clipx": clipx_processes,
    "open_clip": open_clip,
    "decode": decode_bound,
}
"""Loaders that are compared, and the bound of decoding."""


def stream_of_run(run_dir: Path) -> tuple[RunSpec, Dataset, TrainBatches]:
    """Returns the spec, the data set and the training stream of a run directory, for one rank."""
    from clipx.trainer.saved_run import open_run

    spec = open_run(str(run_dir)).spec
    dataset = open_data(spec.data)
    order = training_order(spec.data, dataset, spec.seed, ranks=1)
    images = reader_of(spec.model.image, spec.data)
    texts = TextReader(spec.model.text.build_tokenizer(), mask=used_mask(spec.data.caption_mask))
    return spec, dataset, TrainBatches(dataset.train, order, images, texts, spec.seed)


def rate_of_run(comm: Comm, run_dir: str, count: int) -> float:
    """Measures the samples per second of a run's loader for one rank, without training."""
    fork_workers()
    spec, dataset, stream = stream_of_run(Path(run_dir))
    batch = min(spec.data.batch_size, sum(dataset.train.sizes))
    workers = spec.data.loader_processes()
    loader = _loader(stream, batch, workers, spec.data.prefetch)
    return _per_second(loader, batch, count, workers * spec.data.prefetch)
