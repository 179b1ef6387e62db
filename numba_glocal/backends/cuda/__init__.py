"""The CUDA backend: Numba kernels, no compiler and no CUDA toolkit needed. Importing this package touches no GPU; `backend` does.

Layouts (docs/scoring.md): flat float32 arrays with re, im interleaved; a padded spectrum as in `numba_glocal.fourier` with ``n = 2 c + 1``
rows and ``c + 1`` columns; a *cube* is the grid spectrum for -K .. K, -K .. K, 0 .. K without padding. Particles live in slots of a pool;
kernels are given the slot of each. Nothing here adds up in an order that depends on timing: every run gives the same bits.

A kernel's entry in the JIT cache knows the file that the kernel stands in, not those of the functions that it calls: who changes one that
other files use (`turning.sample`, `packing.phases`, `normal_equations.accumulate`, `launching.block_rotation`, `vector`) empties the cache.
"""
