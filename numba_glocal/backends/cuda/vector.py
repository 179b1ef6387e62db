"""Wide loads and stores for Numba CUDA kernels: 16 bytes in one instruction, as a tuple of four floats.

Numba assumes that array elements are aligned to themselves only, so it never merges neighbouring loads. The kernels that live
on them keep their arrays in groups of four floats, and say so here. Under the simulator they are plain indexing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config

if config.ENABLE_CUDASIM:

    def load4(array: Any, index: int) -> tuple[Any, Any, Any, Any]:
        """Elements ``index .. index + 3`` of a flat float32 array; `index` must be a multiple of 4."""
        return array[index], array[index + 1], array[index + 2], array[index + 3]

    def load2(array: Any, index: int) -> tuple[Any, Any]:
        """Elements ``index, index + 1`` of a flat float32 array; `index` must be even."""
        return array[index], array[index + 1]

    def store_half2(array: Any, index: int, a: Any, b: Any) -> None:
        """Two floats as half precision to ``index, index + 1`` of a flat float16 array; `index` must be even."""
        array[index], array[index + 1] = a, b

    def store_half4(array: Any, index: int, a: Any, b: Any, c: Any, d: Any) -> None:
        """Four floats as half precision to ``index .. index + 3`` of a flat float16 array; `index` must be a multiple of 4."""
        array[index], array[index + 1], array[index + 2], array[index + 3] = a, b, c, d

    def store_narrow4(array: Any, index: int, a: Any, b: Any, c: Any, d: Any) -> None:
        """Four floats to ``index .. index + 3`` of a flat float16 array, or as the nearest whole numbers, which must fit, of an int8 one."""
        for place, value in enumerate((a, b, c, d)):
            array[index + place] = value if array.dtype == np.float16 else int(np.rint(value))

    def load_words4(array: Any, index: int) -> tuple[Any, Any, Any, Any]:
        """Elements ``index .. index + 3`` of a flat int32 array; `index` must be a multiple of 4."""
        return array[index], array[index + 1], array[index + 2], array[index + 3]

    def multiply_tile(*numbers: Any) -> Any:
        """Tensor cores are not simulated."""
        raise NotImplementedError("the simulator has no tensor cores")

    copy_async = wait_for_copies = multiply_tile

    def add_scaled4(sums: Any, factor: Any, values: Any) -> tuple[Any, Any, Any, Any]:
        """``sums + factor * values`` of tuples of four."""
        return tuple(a + factor * b for a, b in zip(sums, values, strict=True))

    def float_bits(value: Any) -> Any:
        """The bits of a float32 as int32."""
        return np.float32(value).view(np.int32)

    def bits_float(bits: Any) -> Any:
        """The float32 with these bits."""
        return np.int32(bits).view(np.float32)

    def jit_for_blocks(threads: int, blocks: int, fastmath: bool = True) -> Any:
        """Decorator of a kernel of which a multiprocessor should hold so many blocks at once: the compiler rations registers by it."""
        return cuda.jit(fastmath=fastmath)

    fast_cos, fast_sin = math.cos, math.sin

else:
    from llvmlite import ir
    from numba.cuda import libdevice, types
    from numba.cuda.extending import intrinsic

    def _make_load(lanes: int) -> Any:
        @intrinsic
        def load(typingctx, array, index):
            result = types.UniTuple(types.float32, lanes)

            def codegen(context, builder, signature, args):
                kind = ir.VectorType(ir.FloatType(), lanes)
                data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
                pointer = builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer(data.type.addrspace))
                vector = builder.load(pointer, align=4 * lanes)
                values = [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(lanes)]
                return context.make_tuple(builder, result, values)

            return result(array, types.intp), codegen

        return load

    load4, load2 = _make_load(4), _make_load(2)

    def _make_store_half(lanes: int) -> Any:
        def codegen(context, builder, signature, args):
            kind = ir.VectorType(ir.HalfType(), lanes)
            data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer(data.type.addrspace))
            vector = ir.Constant(kind, ir.Undefined)
            for lane, value in enumerate(args[2:]):
                vector = builder.insert_element(vector, builder.fptrunc(value, ir.HalfType()), ir.Constant(ir.IntType(32), lane))
            builder.store(vector, pointer, align=2 * lanes)
            return context.get_dummy_value()

        return codegen

    @intrinsic
    def store_half2(typingctx, array, index, a, b):
        return types.void(array, types.intp, *[types.float32] * 2), _make_store_half(2)

    @intrinsic
    def store_half4(typingctx, array, index, a, b, c, d):
        return types.void(array, types.intp, *[types.float32] * 4), _make_store_half(4)

    def _store_eight4(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        single, word = ir.FloatType(), ir.IntType(32)
        asm = ir.InlineAsm(
            ir.FunctionType(word, [single] * 4),
            # v + 1.5 * 2^23 ends in the bits of the nearest whole number; the conversion instructions are four times slower
            "{ .reg .f32 a, b, c, d; .reg .b32 i, j, k, l; "
            "add.rn.f32 a, $1, 0f4B400000; add.rn.f32 b, $2, 0f4B400000; add.rn.f32 c, $3, 0f4B400000; add.rn.f32 d, $4, 0f4B400000; "
            "mov.b32 i, a; mov.b32 j, b; mov.b32 k, c; mov.b32 l, d; "
            "prmt.b32 i, i, j, 0x0040; prmt.b32 k, k, l, 0x0040; prmt.b32 $0, i, k, 0x5410; }",
            "=r,f,f,f,f",
            side_effect=False,
        )
        pointer = builder.bitcast(builder.gep(data, [args[1]]), word.as_pointer(data.type.addrspace))
        builder.store(builder.call(asm, args[2:]), pointer, align=4)
        return context.get_dummy_value()

    @intrinsic
    def store_narrow4(typingctx, array, index, a, b, c, d):
        """Four floats to ``index .. index + 3`` of a flat float16 array, or as the nearest whole numbers, which must fit, of an int8 one."""
        eight = array.dtype == types.int8
        return types.void(array, types.intp, *[types.float32] * 4), _store_eight4 if eight else _make_store_half(4)

    def _make_cast(source: Any, target: Any, kind: Any) -> Any:
        @intrinsic
        def cast(typingctx, value):
            def codegen(context, builder, signature, args):
                return builder.bitcast(args[0], kind)

            return target(source), codegen

        return cast

    float_bits = _make_cast(types.float32, types.int32, ir.IntType(32))
    bits_float = _make_cast(types.int32, types.float32, ir.FloatType())

    @intrinsic
    def load_words4(typingctx, array, index):
        """Elements ``index .. index + 3`` of a flat int32 array; `index` must be a multiple of 4."""
        result = types.UniTuple(types.int32, 4)

        def codegen(context, builder, signature, args):
            kind = ir.VectorType(ir.IntType(32), 4)
            data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer(data.type.addrspace))
            vector = builder.load(pointer, align=16)
            values = [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(4)]
            return context.make_tuple(builder, result, values)

        return result(array, types.intp), codegen

    @intrinsic
    def multiply_tile(typingctx, c0, c1, c2, c3, a0, a1, a2, a3, b0, b1):
        """``C + A B`` for a warp's tile of 16 x 8 with depth 16: A, B in half precision, two to a word, C in single (PTX ``mma.m16n8k16``)."""
        result = types.UniTuple(types.float32, 4)

        def codegen(context, builder, signature, args):
            single, word = ir.FloatType(), ir.IntType(32)
            struct = ir.LiteralStructType([single] * 4)
            asm = ir.InlineAsm(
                ir.FunctionType(struct, [word] * 6 + [single] * 4),
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
                "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
                side_effect=False,
            )
            out = builder.call(asm, [*args[4:], *args[:4]])
            return context.make_tuple(builder, result, [builder.extract_value(out, i) for i in range(4)])

        f, i = types.float32, types.int32
        return result(f, f, f, f, i, i, i, i, i, i), codegen

    @intrinsic
    def add_scaled4(typingctx, sums, factor, values):
        """``sums + factor * values`` of tuples of four floats: one name and one statement, where eight would take far longer to compile."""
        four = types.UniTuple(types.float32, 4)

        def codegen(context, builder, signature, args):
            parts = []
            for i in range(4):
                product = builder.fmul(args[1], builder.extract_value(args[2], i))
                parts.append(builder.fadd(builder.extract_value(args[0], i), product))
            return context.make_tuple(builder, four, parts)

        return four(four, types.float32, four), codegen

    def _make_instruction(text: str) -> Any:
        @intrinsic
        def instruction(typingctx):
            def codegen(context, builder, signature, args):
                builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), text, "~{memory}", side_effect=True), [])
                return context.get_dummy_value()

            return types.void(), codegen

        return instruction

    @intrinsic
    def copy_async(typingctx, shared, to, array, index):
        """Begins to copy 16 bytes, elements ``index .. index + 3`` of a flat int32 array, to shared memory (PTX ``cp.async``)."""

        def codegen(context, builder, signature, args):
            word = ir.IntType(64)
            pointers = []
            for at in (0, 2):
                data = context.make_array(signature.args[at])(context, builder, value=args[at]).data
                pointers.append(builder.ptrtoint(builder.gep(data, [args[at + 1]]), word))
            asm = ir.InlineAsm(
                ir.FunctionType(ir.VoidType(), [word, word]),
                "{ .reg .u64 p; .reg .u32 s; cvta.to.shared.u64 p, $0; cvt.u32.u64 s, p; cp.async.cg.shared.global [s], [$1], 16; }",
                "l,l,~{memory}",
                side_effect=True,
            )
            builder.call(asm, pointers)
            return context.get_dummy_value()

        return types.void(shared, types.intp, array, types.intp), codegen

    wait_for_copies = _make_instruction("cp.async.wait_all;")
    """Waits for this thread's copies."""

    def jit_for_blocks(threads: int, blocks: int, fastmath: bool = True) -> Any:
        """Decorator of a kernel of which a multiprocessor should hold so many blocks at once: the compiler rations registers by it."""
        return cuda.jit(fastmath=fastmath, cache=True, launch_bounds=(threads, blocks))

    fast_cos, fast_sin = libdevice.fast_cosf, libdevice.fast_sinf
    """Of angles within a turn, to 5e-7, in kernels that are not compiled with fast arithmetic throughout."""


__all__ = [
    "add_scaled4",
    "bits_float",
    "copy_async",
    "cuda",
    "fast_cos",
    "fast_sin",
    "float_bits",
    "jit_for_blocks",
    "load2",
    "load4",
    "load_words4",
    "multiply_tile",
    "store_half2",
    "store_half4",
    "store_narrow4",
    "wait_for_copies",
]
