"""Imports what most commands need, once for all processes that `forks` starts: torch, timm, Hydra, clipx's options.

Modules that tests run as `__main__` are left out, because a fork would hold them twice.
"""

# ruff: noqa: F401

import gc

import fsspec.implementations.local
import hydra._internal.hydra
import matplotlib.backends.backend_agg
import matplotlib.figure
import torch._dynamo  # torch's optimizers import it
import torch.distributed

import clipx.distributed.rendezvous
import clipx.trainer.trainer
from clipx.config.registry import CONF_DIR, discover, discover_installed

discover_installed()
discover(CONF_DIR)
gc.collect()
gc.freeze()  # no collection in a fork traverses these objects, or copies their pages
