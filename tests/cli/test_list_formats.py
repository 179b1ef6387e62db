"""`align` and `average` with the lists of other packages: the same particles, the same poses, whatever format lists them."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest

from numba_glocal.geometry import angle_between_deg
from numba_glocal.io import read_particles, read_volume, write_particles
from numba_glocal.values import TiltRange

TILTS = (-60.0, 45.0)
SUFFIX = {"pytom": ".xml", "dynamo": ".tbl", "stopgap": ".star", "av3": ".em"}
ALIGN = ("--particle-diameter", "200", "--initial-lowpass", "80", "--iterations", "1", "--split", "particle", "--cpu-procs", "1")


@pytest.fixture
def listed(tiny):
    """The tiny set under names p1.mrc ..., its wedge given as tilts, in every format: a function from a format to options of a command."""
    folder = tiny.folder
    for i, path in enumerate(sorted((folder / "subtomo").glob("particle_*.mrc")), 1):
        path.rename(folder / "subtomo" / f"p{i}.mrc")
    particles = read_particles(tiny.list, require_volumes=False)
    names = tuple(f"subtomo/p{i + 1}.mrc" for i in range(len(particles)))
    particles = dataclasses.replace(particles, names=names, weight_paths=((TiltRange(*TILTS),),) * len(particles), source=None)

    def listed(kind):
        if kind == "relion":
            path = folder / "plain.star"
            write_particles(path, dataclasses.replace(particles, weight_paths=(None,) * len(particles)))
            return path, ("--tilt-range", *TILTS)
        path = folder / f"list{SUFFIX[kind]}"
        write_particles(path, particles, to=kind)
        options = ("--pixel-size", 16)
        if kind != "pytom":
            options += ("--particle-names", "subtomo/p{}.mrc")
        if kind == "stopgap":
            rows = "".join(f"{tomogram} {tilt}\n" for tomogram in range(1, 6) for tilt in np.linspace(*TILTS, 36))
            (folder / "wedges.star").write_text(f"data_stopgap_wedgelist\nloop_\n_tomo_num\n_tilt_angle\n{rows}")
            options += ("--wedge-list", folder / "wedges.star")
        if kind == "av3":
            header = struct.pack("<4B3i", 6, 0, 0, 5, 3, 5, 1).ljust(512, b"\0")
            table = np.array([(tomogram, *TILTS) for tomogram in range(1, 6)], "<f4")
            (folder / "wedges.em").write_bytes(header + table.tobytes())
            options += ("--wedge-list", folder / "wedges.em")
        return path, options

    return listed


def command(invoke, *arguments):
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output + done.stderr
    return done


def poses_of(run):
    return read_particles(run / "particles.star", require_volumes=False).poses


@pytest.mark.filterwarnings("ignore:.*(holds no wedges|have no half-sets)")
@pytest.mark.parametrize("kind", SUFFIX)
def test_every_format_gives_the_poses_of_the_star_list(tiny, listed, invoke, tmp_path, kind):
    for name in ("relion", kind):
        path, options = listed(name)
        done = command(invoke, "align", path, "-o", tmp_path / name, "--reference", tiny.reference, *ALIGN, *options)
        assert "12 particles with tilts -60 to 45 about y" in " ".join(done.output.split())
    expected, found = poses_of(tmp_path / "relion"), poses_of(tmp_path / kind)
    start = read_particles(listed("relion")[0]).poses
    assert angle_between_deg(start.rotations, expected.rotations).max() > 1  # they were searched
    # lists carry six digits or single precision, and a search that starts a hundred thousandth of a degree elsewhere stops elsewhere,
    # by far less than its step (4.5 degrees) and its error
    assert angle_between_deg(expected.rotations, found.rotations).max() < 0.25
    assert np.abs(expected.shifts_angst - found.shifts_angst).max() < 0.25
    # the list in its own format says the same, and a run can start from either
    own = tmp_path / kind / ("particles_stopgap.star" if kind == "stopgap" else f"particles{SUFFIX[kind]}")
    options = {} if kind == "pytom" else {"particle_names": "subtomo/p{}.mrc"}
    again = read_particles(own, pixel_size_angst=16.0, root=tiny.folder, **options)
    assert angle_between_deg(again.poses.rotations, found.rotations).max() < 1e-4
    assert np.abs(again.poses.shifts_angst - found.shifts_angst).max() < 1e-4
    relion = read_particles(tmp_path / kind / "particles.star")
    assert [p.name for p in relion.volume_paths] == [p.name for p in again.volume_paths]
    assert sorted(relion.half.tolist()) == [1] * 6 + [2] * 6
    assert again.half.tolist() == (relion.half.tolist() if kind in ("pytom", "stopgap") else [0] * 12)
    np.testing.assert_allclose(again.scores, relion.scores, rtol=1e-4)
    assert (tmp_path / kind / "iter_001" / own.name).is_file()


@pytest.mark.filterwarnings("ignore:.*(holds no wedges|have no half-sets)")
def test_averages_and_the_sign_of_tilts(listed, invoke, tmp_path):
    """Field case 34: a one-sided wedge and its mirror image are not the same, and --flip-tilt turns one into the other."""
    options = ("--particle-diameter", "200", "--split", "particle", "--cpu-procs", "1")
    maps = {}
    for name, kind, more in (
        ("relion", "relion", ()),
        ("pytom", "pytom", ()),
        ("flipped", "pytom", ("--flip-tilt",)),
        ("other", "relion", ("--flip-tilt",)),
    ):
        path, given = listed(kind)
        done = command(invoke, "average", path, "-o", tmp_path / name, *options, *given, *more)
        assert ("taken with the other sign" in " ".join(done.output.split())) == bool(more)
        maps[name] = read_volume(tmp_path / name / "average.mrc").data
    scale = maps["relion"].std()
    assert np.abs(maps["pytom"] - maps["relion"]).max() < 1e-3 * scale
    assert np.abs(maps["flipped"] - maps["other"]).max() < 1e-3 * scale
    assert np.abs(maps["flipped"] - maps["pytom"]).max() > 0.05 * scale


def test_one_line_where_an_option_does_not_fit(listed, invoke, tmp_path):
    path, _ = listed("relion")
    done = invoke("average", path, "-o", tmp_path / "run", "--particle-names", "p{}.mrc")
    assert done.exit_code == 2 and "a RELION STAR takes no --particle-names" in done.stderr and len(done.stderr.splitlines()) == 1
    path, options = listed("dynamo")
    done = invoke("average", path, "-o", tmp_path / "run", *options[:2])
    assert done.exit_code == 2 and "--particle-names gives others" in done.stderr
    assert not (tmp_path / "run").exists()
