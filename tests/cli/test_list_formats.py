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
    # a run that goes on from it has the same wedge
    assert set(relion.weight_paths) == {(TiltRange(*TILTS),)}
    assert sorted(relion.half.tolist()) == [1] * 6 + [2] * 6
    assert again.half.tolist() == (relion.half.tolist() if kind in ("pytom", "stopgap") else [0] * 12)
    np.testing.assert_allclose(again.scores, relion.scores, rtol=1e-4)
    assert (tmp_path / kind / "iter_001" / own.name).is_file()


@pytest.mark.filterwarnings("ignore:.*(holds no wedges|have no half-sets)")
def test_averages_and_the_sign_of_tilts(listed, invoke, tmp_path):
    """Field cases 34, 37: a one-sided wedge and its mirror image are not the same; --flip-tilt turns one into the other, and the plan says so."""
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


def test_convert_between_packages(shared, invoke, tmp_path):
    """Real lists to every other format: poses stay, what is lost is said, and the lists' own options are asked for by name."""
    lists = shared / "data/lists"
    wedge = lists / "stopgap_wedge_list.star"
    sources = {"pytom_particles_10.xml": (), "dynamo_35col.tbl": ("{}.mrc",), "stopgap_motl.star": ("{}.mrc",), "emmotl_ribosome.em": ("{}.mrc",)}
    for name, template in sources.items():
        given = {"pixel_size_angst": 2.5, "require_volumes": False, **({"particle_names": template[0]} if template else {})}
        before = read_particles(lists / name, **given)
        for target in ("a.xml", "a.tbl", "a.em", "relion.star", "stopgap.star"):
            key = {"relion.star": ("--to", "relion31"), "stopgap.star": ("--to", "stopgap")}.get(target, ())
            done = command(
                invoke,
                "convert",
                lists / name,
                tmp_path / target,
                *key,
                "--pixel-size",
                2.5,
                "--overwrite",
                *(("--particle-names", *template) if template else ()),
            )
            named = {
                "pixel_size_angst": 2.5,
                "require_volumes": False,
                **({"particle_names": "{}.mrc"} if "xml" not in target and "relion" not in target else {}),
            }
            after = read_particles(tmp_path / target, **named)
            assert angle_between_deg(before.poses.rotations, after.poses.rotations).max() < 5e-5
            assert np.abs(before.poses.shifts_angst - after.poses.shifts_angst).max() < 2e-5
            # places that nobody filled in are none
            assert (before.coordinates is None) == (after.coordinates is None) == name.endswith(".xml")
            if before.coordinates is not None:
                assert np.abs(before.coordinates.as_voxels() - after.coordinates.as_voxels()).max() < 1e-5
            if template or "xml" in target or "relion" in target:
                assert after.names == before.names
            said = " ".join((done.output + done.stderr).split())
            if name.endswith(".tbl"):
                assert ("tilt ranges" in said) == (target in ("a.em", "stopgap.star"))
                assert (after.weight_paths == before.weight_paths) == (target not in ("a.xml", "a.em", "stopgap.star"))
    with pytest.raises(AssertionError, match="no tilts of tomogram 24"):
        command(invoke, "convert", lists / "stopgap_motl.star", tmp_path / "b.xml", "--pixel-size", 2.5, "--wedge-list", wedge)
    done = invoke("convert", lists / "pytom_particles_10.xml", tmp_path / "b.tbl")
    assert done.exit_code == 2 and "no pixel size in the list" in done.stderr and not (tmp_path / "b.tbl").exists()
