"""The package as it is built and installed, and the house rules that can be read from its source: imports go downwards, none touches CUDA."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = ROOT / "numba_glocal"
CLI = ROOT / "cli"

# From the top of the house to the bottom; a room imports from its own storey and from those below. A new module or folder gets its place here.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("refinement",),
    ("classification", "common_frame"),
    ("start", "hand"),
    ("extraction", "passes", "reference_maps", "schedule"),
    ("job",),
    ("alignment", "averaging", "execution", "devices", "particles", "tilt_images", "tomogram_boxes", "simulation"),
    ("backends",),
    ("io", "results", "file_writer", "wedge", "report", "report_template"),
    ("ctf", "filters", "half_sets", "masks", "noise", "noise_groups", "phantom", "pose_prior", "resolution", "sampling", "shifts", "symmetry"),
    ("geometry", "fourier"),
    ("values", "settings"),
    ("errors",),
)
STOREY = {name: len(LAYERS) - i for i, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """Every module by its name once installed."""
    found = {}
    for folder, package in ((LIBRARY, "numba_glocal"), (CLI, "numba_glocal.cli")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imports_of(name: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str, bool]]:
    """Line, full name and whether at the top of the module, of everything in this package that a module imports."""
    tree = ast.parse(path.read_text(), str(path))
    top = {id(node) for node in tree.body}
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            # `from x import y`: y may be a module or something in x.
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "numba_glocal":
                yield node.lineno, target, id(node) in top


def room(name: str) -> str:
    """The module or folder right below the package; empty for the package itself."""
    return (name.split(".") + [""])[1]


def test_every_room_has_its_storey():
    missing = sorted({room(name) for name in modules()} - set(STOREY) - {""})
    assert not missing, f"give {missing} a place in LAYERS ({Path(__file__).name})"


def test_imports_go_downwards():
    known = modules()
    wrong = []
    for name, path in known.items():
        for line, target, _ in imports_of(name, path, known):
            if room(target) and STOREY.get(room(target), 0) > STOREY.get(room(name), 0):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}, which stands above it")
    assert not wrong, "\n".join(wrong)


def test_the_library_never_imports_cli():
    known = modules()
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for name, path in known.items()
        if room(name) != "cli"
        for line, target, _ in imports_of(name, path, known)
        if room(target) == "cli"
    ]
    assert not wrong
    # An absolute import of itself would find another copy when the folder stands in front of the installed package.
    own = [
        f"{path.name}:{node.lineno}"
        for path in CLI.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("cli", "numba_glocal.cli"))
    ]
    assert not own, f"cli imports itself absolutely: {own}"


def test_no_import_goes_in_a_circle():
    known = modules()
    graph = {name: {target for _, target, at_top in imports_of(name, path, known) if at_top} - {name} for name, path in known.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in sorted(graph.get(name, ())):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_scan_sees_what_it_must(tmp_path):
    path = tmp_path / "m.py"
    path.write_text("from ..errors import X\nfrom . import cpu\nfrom .. import values\ndef f():\n    import numba_glocal.cli.main\n")
    known = dict.fromkeys(["numba_glocal.errors", "numba_glocal.backends.cpu", "numba_glocal.values", "numba_glocal.backends.m"], path)
    assert list(imports_of("numba_glocal.backends.m", path, known)) == [
        (1, "numba_glocal.errors", True),
        (2, "numba_glocal.backends.cpu", True),
        (3, "numba_glocal.values", True),
        (5, "numba_glocal.cli.main", False),
    ]


# --- CUDA -----------------------------------------------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, cwd=Path(ROOT.anchor), check=True
    )
    return set(done.stdout.split())


def of_cuda(names: set[str]) -> set[str]:
    roots = ("numba.cuda", "numba_cuda", "cuda", "cupy", "pynvml", "nvidia")
    return {name for name in names if any(name == root or name.startswith(f"{root}.") for root in roots)}


def test_importing_the_package_touches_no_cuda_and_nothing_heavy():
    names = loaded_by("import numba_glocal, numba_glocal.cli")
    assert not of_cuda(names)
    assert not names & {"numpy", "numba", "scipy", "matplotlib", "rich", "multiprocessing"}


def test_no_module_touches_cuda_when_it_is_imported():
    everything = [name for name in modules() if not name.startswith("numba_glocal.backends.cuda")]
    # Numba itself loads a part of numba.cuda; what counts is what comes on top of it.
    assert not of_cuda(loaded_by(f"import {', '.join(everything)}")) - of_cuda(loaded_by("import numba"))


# --- the lists in setup.cfg, and the wheel --------------------------------------------------------------------------------------------------


def setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def test_the_list_of_packages_is_what_lies_on_the_disk():
    listed = setup_cfg()["options"]["packages"].split()
    assert listed == sorted(listed) and len(set(listed)) == len(listed)
    found = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert set(listed) == found


def test_what_is_said_of_installing_works_from_the_sources():
    """The package is on no index: by its name pip finds nothing. Extras that are named exist."""
    extras = set(setup_cfg()["options.extras_require"])
    texts = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "cli").glob("*.py"),
        *(ROOT / "numba_glocal").rglob("*.py"),
    ]
    named = set()
    for path in texts:
        text = path.read_text()
        assert not re.search(r"pip install [^\n]*numba-glocal\[", text), path
        named |= set(re.findall(r"'\.\[(\w+)\]'", text))
    assert {"cuda12", "cuda13"} <= named <= extras


def test_no_package_file_in_the_tests():
    assert not list((ROOT / "tests").rglob("__init__.py")), "tests/cli/__init__.py would shadow cli"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy, so that nothing old in build/ can come along and nothing is left behind."""
    pytest.importorskip("build")
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("source")
    for name in ("numba_glocal", "cli", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", "--outdir", str(source / "out"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / "out").glob("*.whl")
    return path


def test_the_wheel_holds_every_file_and_no_tests(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = {name.split("/")[-1]: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    expected = set()
    for folder, package in ((LIBRARY, "numba_glocal"), (CLI, "numba_glocal/cli")):
        for path in folder.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(f"{package}/{path.relative_to(folder).as_posix()}")
    assert held == expected
    assert "numba-glocal = numba_glocal.cli:main" in info["entry_points.txt"]
    assert "BSD" in info["METADATA"]
    assert "LICENSE" in info


def test_the_wheel_works_by_itself(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import numba_glocal, numba_glocal.cli
print(numba_glocal.__file__, numba_glocal.cli.__file__)
numba_glocal.cli.main()
"""
    # An editable install may be there too; its finder comes after sys.path.
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [str(tmp_path / "numba_glocal" / "__init__.py"), str(tmp_path / "numba_glocal" / "cli" / "__init__.py")]
