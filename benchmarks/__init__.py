"""Benchmarks: generated changes, the peers they are measured against, and how results are written down."""

import os

from gpu_ops.spark.driver.machine import numpy_environment

for _name, _value in numpy_environment().items():
    os.environ.setdefault(_name, _value)  # as a state server has it; NumPy is not imported yet
