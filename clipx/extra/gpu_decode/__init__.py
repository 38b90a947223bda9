"""Decoding of training images on a CUDA device by nvJPEG: data.decode=gpu."""

from clipx.config.registry import declare

declare("decoder", "clipx.extra.gpu_decode.registered", "gpu")
