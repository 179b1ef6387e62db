"""Kernels that are written out as text: a register has no index, so every sum gets a name.

The text goes to a file in the JIT cache, from where Numba loads it, and its compiled form, like any other function.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

from numba.core import config


class Text:
    """Lines of code and their depth."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def __call__(self, line: str, deeper: int = 0) -> None:
        """Adds a line, `deeper` levels further in than the rest."""
        self.lines.append("    " * (self.depth + deeper) + line)

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


def written_function(source: str, name: str, function: str) -> Any:
    """The function called `function` of a module with this text.

    Parameters
    ----------
    source : str
    name : str
        Beginning of the file's name.
    function : str
    """
    digest = hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or tempfile.gettempdir()) / "numba-glocal-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    module_name = f"{name}_{digest}"
    path = folder / f"{module_name}.py"
    if not path.exists() or path.read_text() != source:
        temporary = folder / f".{module_name}.{os.getpid()}"
        temporary.write_text(source)
        os.replace(temporary, path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


_UNASKED_BYTES = 48 << 10
_allowed: dict[int, int] = {}


def allow_shared(kernel: Any, arguments: tuple[Any, ...], shared_bytes: int) -> None:
    """Raises a kernel's limit of dynamic shared memory where a launch needs more than it may have unasked; Numba has no option for it."""
    if shared_bytes <= _UNASKED_BYTES or _allowed.get(id(kernel), 0) >= shared_bytes or config.ENABLE_CUDASIM:
        return
    from numba.cuda.cudadrv.driver import binding, driver

    compiled = kernel.compile(tuple(kernel.typeof_pyval(argument) for argument in arguments))
    function = compiled._codelibrary.get_cufunc()
    attribute = binding.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuKernelSetAttribute(attribute, shared_bytes, function.handle, function.device.id)
    _allowed[id(kernel)] = shared_bytes
