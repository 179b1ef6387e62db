"""Poses of PyTom, Dynamo, STOPGAP and TOM/AV3 lists by rendering: an object without symmetry, placed as each package says it itself.

What a package says is written out here, turn by turn about fixed axes, and shares nothing with the readers.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct

import numpy as np
import pytest

from numba_glocal.io import read_particles, write_particles
from numba_glocal.io.volumes import write_volume
from numba_glocal.phantom import render_phantom
from numba_glocal.values import Volume

pytestmark = pytest.mark.filterwarnings("ignore:.*have no half-sets")

PIXEL = 3.5
# x, y, z and sigma in voxels, and height: five blobs without symmetry or mirror plane
BLOBS = np.array([(4.0, 0, 0, 1.6, 1.0), (0, 3.0, 1.0, 1.4, 0.8), (0, 0, -4.0, 1.5, 0.9), (-2.0, -3.0, 2.0, 1.3, 1.2), (1.0, 2.0, 4.0, 1.4, 0.7)])
# a grid of angles with gimbal lock (0 and 180) and beyond the usual ranges
ANGLES = [(a, b, c) for a, c in itertools.product((-130.0, 0.0, 75.0), (0.0, 40.0, 200.0)) for b in (0.0, 33.0, 90.0, 180.0)] + [(10.0, -50.0, 20.0)]
SHIFTS = [(1.5, -2.0, 0.25), (0.0, 0.0, 0.0), (-0.5, 3.0, -1.75)]


def turn(points, axis, deg):
    """Points turned about a fixed axis, the right-handed way."""
    c, s = np.cos(np.deg2rad(deg)), np.sin(np.deg2rad(deg))
    x, y, z = points.T
    return np.stack({"x": (x, c * y - s * z, s * y + c * z), "z": (c * x - s * y, s * x + c * y, z)}[axis], axis=1)


def render(centres, box):
    """Blobs at centres from the centre voxel box // 2, in voxels, indexed [z, y, x]."""
    z, y, x = np.indices((box, box, box)) - box // 2
    volume = np.zeros((box, box, box))
    for (cx, cy, cz), (sigma, height) in zip(centres, BLOBS[:, 3:], strict=True):
        volume += height * np.exp(-((x - cx) ** 2 + (y - cy) ** 2 + (z - cz) ** 2) / (2 * sigma**2))
    return volume


def as_pytom(angles, shift):
    """PyTom and TOM: the reference is turned by Z1 (phi) about z, then X (theta) about x, then Z2 (psi) about z; then it is shifted."""
    z1, x, z2 = angles
    return turn(turn(turn(BLOBS[:, :3], "z", z1), "x", x), "z", z2) + shift


def as_dynamo(angles, shift):
    """Dynamo: the *particle*, its shift taken off, turned by tdrot about z, then tilt about x, then narot about z, lies on the reference."""
    tdrot, tilt, narot = angles
    # so the reference, turned the other way round in the other order, lies on the particle
    return turn(turn(turn(BLOBS[:, :3], "z", -narot), "x", -tilt), "z", -tdrot) + shift


def write_pytom(path, rows):
    particles = "".join(
        f'<Particle Filename="p{i + 1}.mrc"><Rotation Z1="{a}" Z2="{c}" X="{b}"/><Shift X="{s[0]}" Y="{s[1]}" Z="{s[2]}"/></Particle>\n'
        for i, ((a, b, c), s) in enumerate(rows)
    )
    path.write_text(f"<ParticleList>{particles}</ParticleList>\n")


def write_dynamo(path, rows):
    lines = []
    for i, (angles, shift) in enumerate(rows):
        cells = [i + 1, 1, 1, *shift, *angles] + [0] * 26
        lines.append(" ".join(str(cell) for cell in cells))
    path.write_text("\n".join(lines) + "\n")


def write_stopgap(path, rows):
    labels = "subtomo_num x_shift y_shift z_shift phi psi the".split()
    text = "\ndata_stopgap_motivelist\n\nloop_\n" + "".join(f"_{label}\n" for label in labels) + "\n"
    for i, ((a, b, c), s) in enumerate(rows):
        text += "\t".join(str(cell) for cell in (i + 1, *s, a, c, b)) + "\n"
    path.write_text(text)


def write_av3(path, rows, kind=9):
    table = np.zeros((len(rows), 20), "<f8" if kind == 9 else "<f4")
    for i, ((a, b, c), s) in enumerate(rows):
        table[i, 3], table[i, 10:13], table[i, 16:19] = i + 1, s, (a, c, b)
    path.write_bytes(struct.pack("<4B3i", 6, 0, 0, kind, 20, len(rows), 1).ljust(512, b"\0") + table.tobytes())


KINDS = {
    "pytom": (".xml", write_pytom, as_pytom),
    "dynamo": (".tbl", write_dynamo, as_dynamo),
    "stopgap": (".star", write_stopgap, as_pytom),
    "av3": (".em", write_av3, as_pytom),
}


def read(path):
    kind = path.suffix
    options = {} if kind == ".xml" or "relion" in path.name else {"particle_names": "p{}.mrc"}
    return read_particles(path, pixel_size_angst=PIXEL, require_volumes=False, **options)


def at_pose(rotation, shift_angst, box):
    """The object at one of our poses: R about the centre, then the shift (docs/conventions.md, 1)."""
    return render(BLOBS[:, :3] @ np.asarray(rotation).T + np.asarray(shift_angst) / PIXEL, box)


@pytest.mark.parametrize("box", [16, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_read_poses_render_what_the_package_means(tmp_path, kind, box):
    """Field case 26: gimbal lock, axis order and sense."""
    suffix, write, meaning = KINDS[kind]
    rows = list(itertools.islice(zip(ANGLES, itertools.cycle(SHIFTS), strict=False), 4 if box == 17 else None))
    path = tmp_path / f"list{suffix}"
    write(path, rows)
    particles = read(path)
    assert len(particles) == len(rows)
    for (angles, shift), rotation, shift_angst in zip(rows, particles.poses.rotations, particles.poses.shifts_angst, strict=True):
        expected = render(meaning(angles, shift), box)
        np.testing.assert_allclose(at_pose(rotation, shift_angst, box), expected, atol=1e-9)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", [*KINDS, "relion"])
def test_written_poses_render_alike(tmp_path, source, target):
    """From every package to every other, read back by the meaning of the target and not by its reader."""
    rows = list(zip(ANGLES, itertools.cycle(SHIFTS), strict=False))
    if source == "relion":
        write_pytom(tmp_path / "list.xml", rows)
        write_particles(tmp_path / "relion.star", read(tmp_path / "list.xml"))
        first, meaning = tmp_path / "relion.star", as_pytom
    else:
        suffix, write, meaning = KINDS[source]
        first = tmp_path / f"first{suffix}"
        write(first, rows)
    suffix, _, target_meaning = KINDS[target]
    second = tmp_path / f"second{suffix}"
    particles = read(first)
    write_particles(second, particles if source != target else particles.with_poses(particles.poses), to=target)
    for (angles, shift), (found_angles, found_shift) in zip(rows, cells_of(second), strict=True):
        found = render(target_meaning(found_angles, found_shift), 16)
        # lists carry six digits, motive lists single precision
        np.testing.assert_allclose(found, render(meaning(angles, shift), 16), atol=1e-5)


def cells_of(path):
    """Angles (in the order of `ANGLES`) and shifts of a list, by the simplest means."""
    text = path.read_bytes()
    if path.suffix == ".xml":
        from xml.etree import ElementTree

        for particle in ElementTree.fromstring(text).iter("Particle"):
            rotation, shift = particle.find("Rotation").attrib, particle.find("Shift").attrib
            yield tuple(float(rotation[k]) for k in ("Z1", "X", "Z2")), tuple(float(shift[k]) for k in "XYZ")
    elif path.suffix == ".tbl":
        for line in text.decode().splitlines():
            cells = [float(cell) for cell in line.split()]
            yield tuple(cells[6:9]), tuple(cells[3:6])
    elif path.suffix == ".star":
        lines = [line.split() for line in text.decode().splitlines() if line.strip()]
        labels = [cells[0] for cells in lines if cells[0].startswith("_")]
        for cells in lines:
            if len(cells) == len(labels) and not cells[0].startswith("_"):
                row = dict(zip(labels, cells, strict=True))
                yield tuple(float(row[k]) for k in ("_phi", "_the", "_psi")), tuple(float(row[k]) for k in ("_x_shift", "_y_shift", "_z_shift"))
    else:
        table = np.frombuffer(text, "<f8" if text[3] == 9 else "<f4", offset=512).reshape(-1, 20)
        for row in table:
            yield tuple(row[[16, 18, 17]]), tuple(row[10:13])


def test_the_product_renders_alike(tmp_path):
    """The same through the package's own phantom: what a search compares with is what the list means."""
    rows = list(zip(ANGLES[5:9], itertools.cycle(SHIFTS), strict=False))
    write_dynamo(tmp_path / "list.tbl", rows)
    poses = read(tmp_path / "list.tbl").poses
    for (angles, shift), rotation, shift_angst in zip(rows, poses.rotations, poses.shifts_angst, strict=True):
        turned = np.array([turn(turn(turn(axis[None], "z", -angles[2]), "x", -angles[1]), "z", -angles[0])[0] for axis in np.eye(3)]).T
        expected = render_phantom(24, 12.0, turned, np.array(shift) * PIXEL)
        np.testing.assert_allclose(render_phantom(24, 12.0, rotation, shift_angst), expected, atol=1e-5 * expected.max())


@pytest.mark.parametrize("kind", KINDS)
def test_only_moved_particles_get_new_digits(tmp_path, kind):
    """A list written back is the same bytes; with one pose changed, one particle differs and means the new pose."""
    suffix, write, meaning = KINDS[kind]
    rows = list(zip(ANGLES[:5], itertools.cycle(SHIFTS), strict=False))
    path, again = tmp_path / f"list{suffix}", tmp_path / f"again{suffix}"
    write(path, rows)
    particles = read(path)
    write_particles(again, particles)
    assert again.read_bytes() == path.read_bytes()
    rotations, shifts = particles.poses.rotations.copy(), particles.poses.shifts_angst.copy()
    rotations[2] = rotations[2] @ rotations[1] @ [[0, -1, 0], [1, 0, 0], [0, 0, 1]]
    shifts[2] += [1.0, 2.0, -3.0]
    write_particles(again, particles.with_poses(type(particles.poses)(rotations, shifts)))
    for i, ((angles, shift), (new_angles, new_shift)) in enumerate(zip(rows, cells_of(again), strict=True)):
        if i == 2:
            np.testing.assert_allclose(render(meaning(new_angles, new_shift), 16), at_pose(rotations[2], shifts[2], 16), atol=1e-5)
        else:
            np.testing.assert_allclose((*new_angles, *new_shift), (*angles, *shift), rtol=1e-12)
    # the particles of a half, in another order: rows go with their poses
    some = particles.take([3, 0])
    write_particles(again, some)
    for (angles, shift), (new_angles, new_shift) in zip([rows[3], rows[0]], cells_of(again), strict=True):
        np.testing.assert_allclose((*new_angles, *new_shift), (*angles, *shift), rtol=1e-12)
    back = read(again)
    assert back.names == ("p4.mrc", "p1.mrc") and np.allclose(back.poses.rotations, some.poses.rotations)


@pytest.mark.parametrize("kind", KINDS)
def test_another_pixel_size_moves_no_particle(tmp_path, kind):
    """Shifts are voxels in the list and Angstrom here: with another pixel size they are written again."""
    suffix, write, _ = KINDS[kind]
    path, again = tmp_path / f"list{suffix}", tmp_path / f"again{suffix}"
    write(path, list(zip(ANGLES[:4], itertools.cycle(SHIFTS), strict=False)))
    particles = read(path)
    write_particles(again, dataclasses.replace(particles, pixel_size_angst=2 * PIXEL))
    for before, after in zip(cells_of(path), cells_of(again), strict=True):
        np.testing.assert_allclose(np.array(after[1]) * 2, before[1], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_pixel_size_and_box_come_from_the_volumes(tmp_path, kind):
    suffix, write, _ = KINDS[kind]
    rows = list(zip(ANGLES[:4], SHIFTS + SHIFTS[:1], strict=True))
    for i in range(4):
        write_volume(tmp_path / f"p{i + 1}.mrc", Volume(np.ones((6, 6, 6), np.float32), 2.0))
    write(tmp_path / f"list{suffix}", rows)
    options = {} if kind == "pytom" else {"particle_names": "p{}.mrc"}
    particles = read_particles(tmp_path / f"list{suffix}", **options)
    assert (particles.box_size, particles.pixel_size_angst, particles.pixel_size_source) == (6, 2.0, "volume headers")
    np.testing.assert_allclose(particles.poses.shifts_angst, 2 * np.array([s for _, s in rows]))
    assert [path.name for path in particles.volume_paths] == ["p1.mrc", "p2.mrc", "p3.mrc", "p4.mrc"]
