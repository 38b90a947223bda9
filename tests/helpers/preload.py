"""Preloads torch, timm, Hydra and clipx's options once for all processes that `forks` starts.

Modules that tests run as `__main__` are excluded, because a fork would hold them twice.
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
gc.freeze()  # prevents collections in forks from traversing these objects and copying their pages
