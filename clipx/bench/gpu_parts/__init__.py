"""Parts of `python -m clipx.bench gpu`. A part is a function that measures with `Sizes` and reports numbers."""
