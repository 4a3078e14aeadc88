"""Joins on Spark: DataFrames in, a DataFrame out; the names in ``__init__.pyi`` are imported when first used.

State servers and Python workers import modules of this package; they need no more than those.
"""

from gpu_ops.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
