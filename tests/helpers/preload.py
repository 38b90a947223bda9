"""Preloads torch, timm, Hydra, clipx's options and what its runs import late, for all processes that `forks` starts.

Modules that tests run as `__main__` are excluded, because a fork would hold them twice.
"""

# ruff: noqa: F401

import atexit
import gc
import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `clipx.cli.imports`, before torch is imported

import fsspec.implementations.local
import hydra._internal.hydra
import matplotlib.backends.backend_agg
import matplotlib.figure
import torch._dynamo  # torch's optimizers import it
import torch.distributed

import clipx.checkpoint.uploader
import clipx.data.shards.tar
import clipx.distributed.rendezvous
import clipx.extra.gpu_decode.decoder
import clipx.extra.naflex.tower
import clipx.model.activation_checkpointing
import clipx.model.layers
import clipx.model.lora
import clipx.storage.remote
import clipx.teacher.live
import clipx.teacher.stored
import clipx.trainer.trainer
import clipx.weights.tower
from clipx.config.catalogue import load_groups
from clipx.model.tokenizer import Tokenizer

load_groups()
Tokenizer()  # loads the merge table
gc.collect()
atexit.register(gc.unfreeze)  # else nanobind reports frozen objects as leaks
gc.freeze()  # prevents collections in forks from traversing these objects and copying their pages
