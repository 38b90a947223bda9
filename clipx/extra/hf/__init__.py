"""Parquet files that contain images, data sets of the Hugging Face hub, and the layout of clip_benchmark's sets."""

from clipx.config.registry import declare

declare("data", "clipx.extra.hf.source", "hf")
declare("data", "clipx.extra.hf.benchmark", "benchmark")
declare("data", "clipx.extra.hf.parquet", "parquet")
