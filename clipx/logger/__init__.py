"""Metric loggers: metrics.jsonl in every run, and trackers as options. Each logger has one file and one YAML."""

from clipx.logger.jsonl import Jsonl, read_rows
from clipx.logger.sinks import Sinks, open_sinks
from clipx.logger.spec import LoggerSpec, Row, Sink

__all__ = ["Jsonl", "LoggerSpec", "Row", "Sink", "Sinks", "open_sinks", "read_rows"]
