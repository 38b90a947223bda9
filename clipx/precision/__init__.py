"""Number formats of the towers."""

from clipx.precision.spec import Precision, PrecisionSpec

__all__ = ["Precision", "PrecisionSpec"]
