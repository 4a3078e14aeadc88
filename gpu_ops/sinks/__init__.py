"""Views for Spark's ``foreachBatch``: a changelog becomes a table or a topic that is right after every micro-batch.

``docs/sinks.md`` has what each promises when a micro-batch is repeated. The names are those of ``__init__.pyi``.
"""

from gpu_ops.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
