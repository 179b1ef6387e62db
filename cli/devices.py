"""`numba-glocal devices`: what this machine offers."""

from __future__ import annotations

import click

from numba_glocal.devices import GpuSurvey, Host, survey_gpus, survey_host
from numba_glocal.execution.pinning import visible_devices

from .console import gibibytes, print_facts, print_table, say


@click.command("devices")
def devices_command() -> None:
    """Show the cores, memory, libraries and GPUs that a run would find here."""
    show_host(survey_host())
    say("")
    show_gpus(survey_gpus())


def show_host(host: Host) -> None:
    """Print the CPU side."""
    quota = "" if host.cpu_quota is None else f", quota of {host.cpu_quota:g} cores"
    missing = "not installed"
    print_facts(
        "CPU",
        [
            ("model", host.cpu),
            ("cores", f"{host.cores_usable} usable of {host.cores_total}{quota}; one worker process each, one thread a worker"),
            ("memory", f"{gibibytes(host.memory_available_bytes)} available of {gibibytes(host.memory_total_bytes)}"),
            ("python", host.python),
            *((name, version or missing) for name, version in host.libraries.items()),
            ("JIT cache", str(host.jit_cache)),
        ],
    )


def show_gpus(survey: GpuSurvey) -> None:
    """Print the GPUs, or why there are none."""
    if survey.problem:
        say(f"GPU: {survey.problem}")
        return
    visible = visible_devices()
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={','.join(visible) or '(none)'}"
    print_table(
        ["GPU", "name", "memory", "free", "compute mode", "MIG", "UUID"],
        [
            (
                gpu.index,
                gpu.name,
                gibibytes(gpu.memory_total_bytes),
                gibibytes(gpu.memory_free_bytes),
                gpu.compute_mode,
                "on" if gpu.mig else "off",
                gpu.uuid,
            )
            for gpu in survey.gpus
        ],
        title=f"NVIDIA driver {survey.driver}{hint}",
    )
