"""Small parts of the loop; the loop itself is judged in tests/e2e."""

from __future__ import annotations

import time

import pytest

from numba_glocal.errors import InputError
from numba_glocal.file_writer import FileWriter
from numba_glocal.passes import gpu_sum_chunk


def test_files_are_there_when_the_block_ends_and_in_order():
    done = []

    def write(name):
        time.sleep(0.05)
        done.append(name)

    with FileWriter() as writer:
        for name in "abc":
            writer.write(write, name)
        assert len(done) < 3, "written before the block went on"
    assert done == ["a", "b", "c"]


def test_a_file_that_cannot_be_written_is_an_error_of_the_block():
    def refuse():
        raise InputError("disk full")

    with pytest.raises(InputError, match="disk full"), FileWriter() as writer:
        writer.write(refuse)
        writer.write(lambda: None)
    with pytest.raises(KeyboardInterrupt), FileWriter() as writer:  # the block's own error goes first
        writer.write(refuse)
        raise KeyboardInterrupt


def test_sums_on_a_gpu_are_few_and_their_particles_fit():
    assert [gpu_sum_chunk(box) for box in (32, 64, 128, 256, 400)] == [1024, 1024, 512, 64, 64]
