"""Four or sixteen float32 lanes as one value inside Numba functions.

Numba has no vector type, and LLVM's loop vectoriser keeps running sums in memory where the search kernel
(`numba_glocal.backends.lines`) needs them in registers. So this module teaches Numba two types, ``<4 x float>`` and
``<16 x float>``, with a handful of operations. LLVM splits them into what the processor has: sixteen lanes are one 512-bit
register, two of 256 or four of 128 bits. Loads and stores need no alignment and check no bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.extending import intrinsic, register_model

FAST = {"nsz", "arcp", "contract", "afn", "reassoc"}
"""Fast-math flags of the kernels: any order of operations, but infinities stay what they are (-inf marks what must not be chosen)."""

LANES = 16
"""Lanes of the wide vector; the number of rotations that the search kernel works on at a time."""


class FloatVector(types.Type):
    """Numba type of a vector of float32 lanes."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")

    @property
    def llvm(self) -> ir.VectorType:
        """The LLVM type."""
        return ir.VectorType(ir.FloatType(), self.lanes)


@register_model(FloatVector)
class _FloatVectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


_float4 = FloatVector(4)
_float16 = FloatVector(LANES)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, kind: FloatVector) -> Any:
    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.bitcast(builder.gep(data, [index]), kind.llvm.as_pointer())


def _splat(builder: Any, scalar: Any, kind: FloatVector) -> Any:
    undefined = ir.Constant(kind.llvm, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(ir.IntType(32), kind.lanes), [0] * kind.lanes))


def _make_load(kind: FloatVector) -> Any:
    @intrinsic
    def load(typingctx, array, index):
        def codegen(context, builder, signature, args):
            return builder.load(_address(context, builder, signature.args[0], args[0], args[1], kind), align=4)

        return kind(array, types.intp), codegen

    return load


@intrinsic
def splat16(typingctx, array, index):
    """``array[index]`` of a flat float32 array in all sixteen lanes; unlike an indexing expression it never wraps negative indices."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, value=args[0]).data
        return _splat(builder, builder.load(builder.gep(data, [args[1]])), _float16)

    return _float16(array, types.intp), codegen


def _make_broadcast(kind: FloatVector) -> Any:
    @intrinsic
    def broadcast(typingctx, scalar):
        def codegen(context, builder, signature, args):
            return _splat(builder, args[0], kind)

        return kind(types.float32), codegen

    return broadcast


def _make_zero(kind: FloatVector) -> Any:
    @intrinsic
    def zero(typingctx):
        def codegen(context, builder, signature, args):
            return ir.Constant(kind.llvm, [0.0] * kind.lanes)

        return kind(), codegen

    return zero


load4, load16 = _make_load(_float4), _make_load(_float16)  # lanes array[index : index + lanes] of a flat float32 array
broadcast4, broadcast16 = _make_broadcast(_float4), _make_broadcast(_float16)  # one float32 in every lane
zero16 = _make_zero(_float16)  # all lanes 0


@intrinsic
def store(typingctx, array, index, value):
    """Writes the lanes of `value` to the flat float32 array from `index` on."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], _address(context, builder, signature.args[0], args[0], args[1], signature.args[2]), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), codegen


@intrinsic
def pack4(typingctx, a, b, c, d):
    """Four float32 scalars as one vector."""

    def codegen(context, builder, signature, args):
        vector = ir.Constant(_float4.llvm, ir.Undefined)
        for lane, scalar in enumerate(args):
            vector = builder.insert_element(vector, scalar, ir.Constant(ir.IntType(32), lane))
        return vector

    return _float4(types.float32, types.float32, types.float32, types.float32), codegen


def _make_extract(lane: int) -> Any:
    @intrinsic
    def extract(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.extract_element(args[0], ir.Constant(ir.IntType(32), lane))

        return types.float32(value), codegen

    return extract


lane0, lane1, lane2, lane3 = (_make_extract(i) for i in range(4))  # one lane as a scalar


def _make_binary(name: str) -> Any:
    @intrinsic
    def operation(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return getattr(builder, name)(*args)

        return a(a, a), codegen

    return operation


add, sub, mul = _make_binary("fadd"), _make_binary("fsub"), _make_binary("fmul")


def _fused(builder: Any, kind: FloatVector, a: Any, b: Any, c: Any) -> Any:
    function_type = ir.FunctionType(kind.llvm, [kind.llvm] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, f"llvm.fmuladd.v{kind.lanes}f32"), [a, b, c])


@intrinsic
def muladd(typingctx, a, b, c):
    """``a * b + c`` lane by lane, fused where the processor can."""

    def codegen(context, builder, signature, args):
        return _fused(builder, signature.return_type, *args)

    return a(a, a, a), codegen


@intrinsic
def nmuladd(typingctx, a, b, c):
    """``c - a * b`` lane by lane, fused where the processor can."""

    def codegen(context, builder, signature, args):
        return _fused(builder, signature.return_type, builder.fneg(args[0]), args[1], args[2])

    return a(a, a, a), codegen


@intrinsic
def total(typingctx, value):
    """Sum of the lanes, in a fixed order."""

    def codegen(context, builder, signature, args):
        kind = signature.args[0]
        vector, lanes = args[0], kind.lanes
        while lanes > 1:
            lanes //= 2
            mask = [i + lanes if i < lanes else i for i in range(kind.lanes)]
            moved = builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), kind.lanes), mask))
            vector = builder.fadd(vector, moved)
        return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    return types.float32(value), codegen
