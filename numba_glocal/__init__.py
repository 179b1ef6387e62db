"""numba-glocal: gold-standard subtomogram alignment and averaging.

Importing this package never touches CUDA, and starts no process or thread.
"""

__version__ = "0.1.0"
