"""Number formats of the towers."""

from clipx.config.registry import declare
from clipx.precision.spec import Precision, PrecisionSpec

__all__ = ["Precision", "PrecisionSpec"]

declare("precision", "clipx.precision.quantized", "float8", "int8")
