"""What a worker says of a GPU that it cannot use; with CUDA's own words, for no such GPU is here."""

from __future__ import annotations

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from numba import config

from numba_glocal.backends.cuda import backend
from numba_glocal.devices import survey_gpus
from numba_glocal.errors import DeviceError

if config.ENABLE_CUDASIM:
    pytest.skip("the simulator has a device", allow_module_level=True)

NO_LIBRARY = "Error at driver init: \n\nCUDA driver library cannot be found.\nEnsure that a compatible NVIDIA driver is installed:\n:"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (NO_LIBRARY, r"the GPU cannot be used: there is no NVIDIA driver on this machine \(Error at driver init: CUDA driver library cannot .*\)"),
        (
            "[100] Call to cuInit results in CUDA_ERROR_NO_DEVICE",
            r"the GPU cannot be used: CUDA finds none of this name \(\[100\] Call to cuInit .*\)",
        ),
        (
            "[46] Call to cuDevicePrimaryCtxRetain results in CUDA_ERROR_DEVICE_UNAVAILABLE",
            r"the GPU cannot be used: another process has it, .* one only; expected --procs-per-gpu 1, or MPS \(\[46\] .*\)",
        ),
        ("[999] Call to cuInit results in\nCUDA_ERROR_UNKNOWN", r"the GPU cannot be used: \[999\] Call to cuInit results in CUDA_ERROR_UNKNOWN"),
    ],
)
def test_why_a_gpu_cannot_be_used_is_one_line(words, text, monkeypatch):
    def refuse():
        raise RuntimeError(words)

    monkeypatch.setattr(backend.cuda, "get_current_device", refuse)
    with pytest.raises(DeviceError, match=f"^{text}$") as caught:
        backend.device_name()
    assert "\n" not in str(caught.value)


def test_without_a_driver_these_are_the_words():
    if survey_gpus().gpus or not survey_gpus().known:
        pytest.skip("there is a driver")
    with pytest.raises(DeviceError, match="^the GPU cannot be used: there is no NVIDIA driver on this machine"):
        backend.device_name()
