"""Wide loads and stores for Numba CUDA kernels: 16 bytes in one instruction, as a tuple of four floats.

Numba assumes that array elements are aligned to themselves only, so it never merges neighbouring loads. The kernels that live
on them keep their arrays in groups of four floats, and say so here. Under the simulator they are plain indexing.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.core import config

if config.ENABLE_CUDASIM:

    def load4(array: Any, index: int) -> tuple[Any, Any, Any, Any]:
        """Elements ``index .. index + 3`` of a flat float32 array; `index` must be a multiple of 4."""
        return array[index], array[index + 1], array[index + 2], array[index + 3]

    def load2(array: Any, index: int) -> tuple[Any, Any]:
        """Elements ``index, index + 1`` of a flat float32 array; `index` must be even."""
        return array[index], array[index + 1]

    def store_half4(array: Any, index: int, a: Any, b: Any, c: Any, d: Any) -> None:
        """Four floats as half precision to ``index .. index + 3`` of a flat float16 array; `index` must be a multiple of 4."""
        array[index], array[index + 1], array[index + 2], array[index + 3] = a, b, c, d

    def jit_for_blocks(threads: int, blocks: int) -> Any:
        """Decorator of a kernel of which a multiprocessor should hold so many blocks at once: the compiler rations registers by it."""
        return cuda.jit(fastmath=True)

else:
    from llvmlite import ir
    from numba.cuda import types
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

    @intrinsic
    def store_half4(typingctx, array, index, a, b, c, d):
        def codegen(context, builder, signature, args):
            kind = ir.VectorType(ir.HalfType(), 4)
            data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
            pointer = builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer(data.type.addrspace))
            vector = ir.Constant(kind, ir.Undefined)
            for lane, value in enumerate(args[2:]):
                vector = builder.insert_element(vector, builder.fptrunc(value, ir.HalfType()), ir.Constant(ir.IntType(32), lane))
            builder.store(vector, pointer, align=8)
            return context.get_dummy_value()

        f = types.float32
        return types.void(array, types.intp, f, f, f, f), codegen

    def jit_for_blocks(threads: int, blocks: int) -> Any:
        """Decorator of a kernel of which a multiprocessor should hold so many blocks at once: the compiler rations registers by it."""
        return cuda.jit(fastmath=True, cache=True, launch_bounds=(threads, blocks))


__all__ = ["cuda", "jit_for_blocks", "load2", "load4", "store_half4"]
