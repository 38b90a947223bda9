"""Loggers of MLflow and Trackio."""

from clipx.config.registry import declare

declare("logger", "clipx.extra.trackers.mlflow", "mlflow")
declare("logger", "clipx.extra.trackers.trackio", "trackio")
