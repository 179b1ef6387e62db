"""The CUDA backend: Numba kernels, no compiler and no CUDA toolkit needed. Importing this package touches no GPU; `backend` does."""
