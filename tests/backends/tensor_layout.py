"""Run by `test_tensor_layout` under the CUDA simulator: fragments are multiplied and folded in numpy and compared with a plain sum."""

from __future__ import annotations

import numpy as np
from numba import cuda

from numba_glocal.backends import lines
from numba_glocal.backends.cuda import packing, tensor
from numba_glocal.backends.cuda.scratch import Scratch

BOX, K_MAX, ROTATIONS, ITEMS = 16, 3.0, 18, 10


def unpacked(fragments: np.ndarray, tiles: int, chunks: int) -> np.ndarray:
    """(tiles, chunks, lane, half of the lane's words, +z or -z, re and im) of fragments as they lie in memory."""
    return fragments.astype(np.float64).reshape(tiles, chunks, 32, 2, 2, 2)


def main() -> None:
    """Best score and shift of every item and rotation, by fragments and by definition."""
    rng = np.random.default_rng(0)
    band = lines.line_band(K_MAX)
    cube = lines.shift_cube(3.0, 1.4)
    largest2 = float((np.linalg.norm(cube.shifts_voxels[cube.inside], axis=1) ** 2 / cube.step_voxels**2).max()) + 0.5
    pairs = band.n_pairs
    rotated = rng.normal(size=(ROTATIONS, pairs, 4)).astype(np.float32)
    columns = (rng.normal(size=(ITEMS, pairs, 4)) * np.repeat(band.sample_weight.reshape(pairs, 2), 2, axis=1)).astype(np.float32)
    blocks = -(-ROTATIONS // 16)
    templates = np.zeros((blocks, pairs, 16, 4), np.float32)
    for a in range(ROTATIONS):
        templates[a // 16, :, a % 16] = rotated[a]
    powers = np.repeat((rotated**2).reshape(ROTATIONS, 2 * pairs, 2).sum(-1)[:1], ROTATIONS, 0)
    search = tensor.TensorSearch.make(
        band, cube, largest2, BOX, cuda.to_device(templates.ravel()), cuda.to_device(powers), ROTATIONS, np.full(BOX, 1.0, np.float32)
    )
    chunks = search.chunks.count
    scales = np.ones(ITEMS, np.float32)
    item_tiles = -(-ITEMS // 8)
    a_words = unpacked(search.rotated.copy_to_host(), blocks, chunks)
    # a lane's words are +z of rows g and g + 8, then -z of both
    a = a_words.reshape(blocks, chunks, 8, 4, 2, 2, 2).transpose(0, 5, 2, 1, 3, 4, 6).reshape(blocks * 16, chunks, 4, 4)
    best = np.full((ITEMS, ROTATIONS), -1e38)
    best_row = np.full((ITEMS, ROTATIONS), -1)
    angle = 2.0 * np.pi * cube.step_voxels / BOX
    packed = cuda.device_array(search.planes * item_tiles * chunks * 256, np.float16)
    packing.pack_columns[(-(-chunks // 4), item_tiles), 128](
        cuda.to_device(columns.ravel()), 4 * pairs, search.pair, search.depth, search.root, cuda.to_device(scales), search.angles, packed
    )
    # lane 4 (2 item + part) + pair; two tiles of four items
    planes = unpacked(packed.copy_to_host(), search.planes * item_tiles, chunks).reshape(search.planes, item_tiles, chunks, 4, 2, 4, 2, 4)
    for launch in search.launches:
        table = tensor.coefficients(launch.group, search.chunks.units, angle)
        entries = tensor.entry_table(launch.group, cube.steps)
        for row, largest in zip(launch.first_row.copy_to_host(), launch.largest2.copy_to_host(), strict=True):
            b = planes[row].transpose(0, 5, 2, 3, 1, 4, 6).reshape(item_tiles * 8, 2, chunks, 4, 4)
            totals = fold(launch.group, table, search.chunks.units, np.einsum("acpk,iscpk->aisc", a, b))
            for place, further, s1, s2, s3, row_xy, radius2, _ in entries:
                if radius2 > largest:
                    continue
                value = totals[int(place)].copy()
                for number, sign in enumerate((s1, s2, s3)[: int(further)]):
                    value += sign * totals[int(place) + 1 + number]
                value = value.T[:ITEMS, :ROTATIONS] / search.scale
                better = value > best
                best[better], best_row[better] = value[better], int(row_xy) + int(row)
    expected, expected_row = by_definition(band, cube, rotated, columns)
    np.testing.assert_allclose(best, expected, atol=2e-3 * np.abs(expected).max())
    assert (best_row == expected_row).mean() > 0.98
    parts_have_their_own_weights(search, columns)
    print("fragments agree")


def fold(group, table, units, sums):
    """The sums over the band of a group, (sums, rotations, items), as the kernel's text has them."""
    totals = []
    plus = np.array([sums[:, :, :, u[0] : u[0] + u[1]].sum(-1) for u in units])
    minus = np.array([sums[:, :, :, u[0] + u[1] : u[0] + 2 * u[1]].sum(-1) if u[2] else 0 * sums[:, :, :, 0] for u in units])
    s, d = plus + minus, plus - minus
    sr, si, dr, di = s[..., 0], s[..., 1], d[..., 0], d[..., 1]
    phases = tensor.factors(group)
    table = table.astype(np.float64)
    for x, y in group:
        cx, sx = (table[:, 2 * phases.index((0, x)) + i] for i in (0, 1)) if x else (np.ones(len(units)), None)
        cy, sy = (table[:, 2 * phases.index((1, y)) + i] for i in (0, 1)) if y else (np.ones(len(units)), None)
        terms = [(cx * cy, sr)]
        terms += [(cx * sy, di)] if y else []
        terms += [(sx * cy, si)] if x else []
        terms += [(sx * sy, dr)] if x and y else []
        totals += [np.einsum("u,uai->ai", factor, part) for factor, part in terms]
    return totals


def by_definition(band, cube, rotated, columns):
    """Best of ``Re sum conj(F) Y exp(2 pi i q.t / box)`` over the ball."""
    t = rotated.reshape(ROTATIONS, -1, 2).astype(np.float64)
    y = columns.reshape(ITEMS, -1, 2).astype(np.float64)
    f, c = t[..., 0] + 1j * t[..., 1], y[..., 0] + 1j * y[..., 1]
    shifts = cube.shifts_voxels[cube.inside]
    phase = np.exp(2j * np.pi / BOX * (shifts @ (band.lattice @ lines.GENERIC_ROTATION.T).T))
    num = np.einsum("aq,iq,tq->iat", f.conj(), c, phase).real
    return num.max(-1), cube.inside[num.argmax(-1)]


def parts_have_their_own_weights(search, columns):
    """Items that do not fit at once are worked in parts, each with its own rows of the weighting."""
    seen = []
    tensor.TensorSearch._run_part = lambda self, part, scales, weighting, best, best_shift, scratch, shape: seen.append(
        (part.shape[0], weighting.multiplier.copy_to_host()[:, 0], weighting.bias.copy_to_host()[:, 0])
    )
    number = np.repeat(np.arange(ITEMS, dtype=np.float32)[:, None], 3, 1)
    weighting = tensor.Weighting(True, cuda.to_device(number), cuda.to_device(-number))
    best = cuda.device_array((ITEMS, ROTATIONS), np.float32)
    search.run(cuda.to_device(columns.reshape(ITEMS, -1)), ITEMS, weighting, best, best, Scratch(part_bytes=1))
    assert [count for count, _, _ in seen] == [8, 2]
    np.testing.assert_array_equal(np.concatenate([multiplier for _, multiplier, _ in seen]), np.arange(ITEMS))
    np.testing.assert_array_equal(np.concatenate([bias for _, _, bias in seen]), -np.arange(ITEMS))


if __name__ == "__main__":
    main()
