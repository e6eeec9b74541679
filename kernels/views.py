"""The arrays of compiled loops: an address, lengths, and strides unless the array is packed.

numba's own are nine words each, handed on to every function. A loop never asks for an index below 0 or beyond the end, so none
is looked at, unless `CHECK_INDICES` is set before anything is compiled: then such a one ends the process (`make checked`).
Only `compiling` imports this module.
"""

import operator
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_getattr, infer_global, signature
from numba.cpython.slicing import fix_slice
from numba.extending import lower_builtin, lower_getattr, models, register_model

CHECK_INDICES = False


class View(types.Type):
    """An array that a loop is given: `ndim` axes of `dtype`, C-contiguous if it is `packed`."""

    def __init__(self, dtype: str, ndim: int, *, packed: bool) -> None:
        self.dtype, self.ndim, self.packed = getattr(types, dtype), ndim, packed
        super().__init__(name=f"View({dtype}, {ndim}, {'packed' if packed else 'strided'})")

    def of(self, ndim: int) -> "View":
        """Return the type of what has fewer axes."""
        return View(self.dtype.name, ndim, packed=self.packed)


@register_model(View)
class _ViewModel(models.StructModel):
    def __init__(self, manager: Any, view: View) -> None:
        lengths = [(f"length{axis}", types.intp) for axis in range(view.ndim)]
        strides = [] if view.packed else [(f"stride{axis}", types.intp) for axis in range(view.ndim)]
        super().__init__(manager, view, [("data", types.CPointer(view.dtype)), *lengths, *strides])


def _item_types(view: Any, index: Any) -> tuple[Any, Any] | None:
    """Return the types of `view[index]` and of the index as it is lowered, None if the view has no such item."""
    if not isinstance(view, View):
        return None
    given = list(index) if isinstance(index, types.BaseTuple) else [index]
    if not all(isinstance(one, (types.Integer, types.SliceType)) for one in given) or len(given) > view.ndim:
        return None
    as_lowered = [types.intp if isinstance(one, types.Integer) else types.slice2_type for one in given]
    left = view.ndim - as_lowered.count(types.intp)
    result = view.of(left) if left else view.dtype
    return result, types.Tuple(as_lowered) if isinstance(index, types.BaseTuple) else as_lowered[0]


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    def generic(self, args: Any, _kws: Any) -> Any:
        found = _item_types(*args)
        return found and signature(found[0], args[0], found[1])


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args: Any, _kws: Any) -> Any:
        found = _item_types(args[0], args[1])
        one = found is not None and found[0] == args[0].dtype
        return signature(types.none, args[0], found[1], args[0].dtype) if found is not None and one else None


@infer_global(len)
class _Len(AbstractTemplate):
    def generic(self, args: Any, _kws: Any) -> Any:
        return signature(types.intp, *args) if isinstance(args[0], View) else None


@infer_getattr
class _Shape(AttributeTemplate):
    key = View

    def resolve_shape(self, view: View) -> Any:
        return types.UniTuple(types.intp, view.ndim)


@lower_getattr(View, "shape")
def _lower_shape(context: Any, builder: Any, view: View, value: Any) -> Any:
    fields = cgutils.create_struct_proxy(view)(context, builder, value)
    lengths = [getattr(fields, f"length{axis}") for axis in range(view.ndim)]
    return context.make_tuple(builder, types.UniTuple(types.intp, view.ndim), lengths)


@lower_builtin(len, View)
def _lower_len(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return cgutils.create_struct_proxy(sig.args[0])(context, builder, args[0]).length0


def _place(
    context: Any, builder: Any, view: View, value: Any, kind: Any, index: Any
) -> tuple[Any, list[Any], list[Any]]:
    """Return the address of what an index asks for, with its lengths and strides (none if packed)."""
    fields = cgutils.create_struct_proxy(view)(context, builder, value)
    axes = range(view.ndim)
    lengths = [getattr(fields, f"length{axis}") for axis in axes]
    strides = [] if view.packed else [getattr(fields, f"stride{axis}") for axis in axes]
    kinds = list(kind) if isinstance(kind, types.BaseTuple) else [kind]
    indices = cgutils.unpack_tuple(builder, index) if isinstance(kind, types.BaseTuple) else [index]
    kept = list(range(len(kinds), view.ndim))
    data = fields.data
    first = []
    for axis, (one, number) in enumerate(zip(kinds, indices, strict=True)):
        begin = number
        if not isinstance(one, types.Integer):
            part = context.make_helper(builder, types.slice2_type, number)
            fix_slice(builder, part, lengths[axis])
            begin, lengths[axis] = part.start, builder.sub(part.stop, part.start)
            nothing = builder.icmp_signed("<", lengths[axis], lengths[axis].type(0))
            lengths[axis] = builder.select(nothing, lengths[axis].type(0), lengths[axis])
            kept.append(axis)
        elif CHECK_INDICES:
            with builder.if_then(builder.icmp_unsigned(">=", begin, lengths[axis]), likely=False):
                builder.call(builder.module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), ())), ())
        first.append(begin)
    if view.packed:
        offset = first[0]
        if view.ndim == 2:
            width = cgutils.create_struct_proxy(view)(context, builder, value).length1
            offset = builder.mul(offset, width)
            if len(first) == 2:
                offset = builder.add(offset, first[1])
        data = builder.gep(data, [offset])
    else:
        offset = builder.mul(first[0], strides[0])
        if len(first) == 2:
            offset = builder.add(offset, builder.mul(first[1], strides[1]))
        as_bytes = builder.bitcast(data, cgutils.voidptr_t)
        data = builder.bitcast(builder.gep(as_bytes, [offset]), data.type)
    kept.sort()
    return data, [lengths[axis] for axis in kept], [strides[axis] for axis in kept] if strides else []


def make_view(context: Any, builder: Any, view: View, data: Any, lengths: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Return the view of what lies at an address."""
    fields = cgutils.create_struct_proxy(view)(context, builder)
    fields.data = data
    for axis, length in enumerate(lengths):
        setattr(fields, f"length{axis}", length)
    for axis, stride in enumerate(strides):
        setattr(fields, f"stride{axis}", stride)
    return fields._getvalue()


@lower_builtin(operator.getitem, View, types.Any)
def _lower_getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    view, kind = sig.args
    data, lengths, strides = _place(context, builder, view, args[0], kind, args[1])
    if lengths:
        return make_view(context, builder, sig.return_type, data, lengths, strides)
    return builder.load(data)


@lower_builtin(operator.setitem, View, types.Any, types.Any)
def _lower_setitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    view, kind, _value = sig.args
    data, _lengths, _strides = _place(context, builder, view, args[0], kind, args[1])
    builder.store(args[2], data)
    return context.get_dummy_value()
