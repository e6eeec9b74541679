"""Loops made machine code: numba types them and writes LLVM's text, then LLVM optimises all of it at once.

numba by itself optimises every function together with all that it calls, again and again. Here nothing is optimised, or made
machine code, before the last function is there, and arrays are `View`s.

Only what is compiled for the first time on a machine imports this module, and numba with it.
"""

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
from numba import types
from numba.core import cgutils, codegen, compiler, typed_passes, typing, untyped_passes
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target
from numba.core.typing.templates import AbstractTemplate, signature

from .dispatch import parameter_of, type_hints
from .views import View, make_view


class _Texts(codegen.CodeLibrary):
    """What numba wrote of a function, and the libraries of those that it calls."""

    _object_compiled_hook = _object_getbuffer_hook = None

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__(owner, name)
        self.texts: list[str] = []
        self.called: list[Any] = []

    def add_ir_module(self, ir_module: Any) -> None:
        self.texts.append(str(ir_module))

    def add_linking_library(self, library: Any) -> None:
        self.called.append(library)

    def finalize(self) -> None:
        self._finalized = True

    def get_function(self, name: str) -> Any:
        raise NotImplementedError(name)

    def get_llvm_str(self) -> str:
        return "\n".join(self.texts)

    def get_asm_str(self) -> str:
        return ""


class _Codegen(codegen.AOTCPUCodegen):
    _library_class = _Texts


class _Pipeline(compiler.CompilerBase):
    """numba's passes without those that find nothing in a plain loop: closures, generators, with, array expressions."""

    def define_pipelines(self) -> list[Any]:
        manager = PassManager("loops")
        for one in (
            untyped_passes.TranslateByteCode,
            untyped_passes.FixupArgs,
            untyped_passes.IRProcessing,
            untyped_passes.GenericRewrites,
            untyped_passes.ReconstructSSA,
            typed_passes.NopythonTypeInference,
            typed_passes.PreLowerStripPhis,
            typed_passes.IRLegalization,
            typed_passes.NativeLowering,
            typed_passes.NoPythonBackend,
        ):
            manager.add_pass(one, one.__name__)
        manager.finalize()
        return [manager]


class _Smallest(AbstractTemplate):
    """`min`, `max` and `int` of what an int64 holds; numba would compile a function for each."""

    key = "kvcanary.min"

    def generic(self, args: Any, _kws: Any) -> Any:
        given = [_widened(one) for one in args]
        return signature(types.int64, *given) if all(one == types.int64 for one in given) else None


class _Largest(_Smallest):
    key = "kvcanary.max"


class _Number(_Smallest):
    key = "kvcanary.int"


def _lower_choice(comparison: str) -> Callable[..., Any]:
    def lower(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        def choose(one: Any, other: Any) -> Any:
            return builder.select(builder.icmp_signed(comparison, one, other), one, other)

        return functools.reduce(choose, args)

    return lower


class _Typing(typing.Context):
    def __init__(self) -> None:
        self.own: dict[Any, Any] = {}
        super().__init__()

    def resolve_value_type(self, val: Any) -> Any:
        found = self.own.get(val) if callable(val) else None
        return super().resolve_value_type(val) if found is None else found


@functools.cache
def _contexts() -> tuple[Any, Any]:
    """Return numba's typing and target context for loops, apart from those of other packages' functions."""
    typing_context, target = _Typing(), cpu_target.target_context
    typing_context.refresh()
    target.refresh()
    target = target.subtarget(_internal_codegen=_Codegen("kvcanary"))
    for function, template, lower in (
        (min, _Smallest, _lower_choice("<")),
        (max, _Largest, _lower_choice(">")),
        (int, _Number, lambda _context, _builder, _sig, args: args[0]),
    ):
        typing_context.own[function] = types.Function(template)
        target.insert_func_defn([(lower, template.key, (types.VarArg(types.int64),))])
    return typing_context, target


def _refuse_stores(body: Callable[..., Any]) -> None:
    """Raise `TypeError` if loops store into an array that is declared as read only, or hand it to what is declared to."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(body))).body[0]
    except OSError:  # no file to read
        return
    names: dict[str, Any] = dict(type_hints(body))

    def hint_of(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = hint_of(node.value)
            return type_hints(owner).get(node.attr) if isinstance(owner, type) else None
        if isinstance(node, ast.Subscript):
            return hint_of(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in body.__globals__:
            called = body.__globals__[node.func.id]
            return called if isinstance(called, type) else getattr(called, "__annotations__", {}).get("return")
        return None

    def is_written(hint: Any) -> bool | None:
        spec = getattr(hint, "__metadata__", (None,))[0]
        return None if spec is None else spec.written

    def require(node: ast.expr) -> None:
        if is_written(hint_of(node)) is False:
            raise TypeError(f"{body.__name__} stores into {ast.unparse(node)}, which is declared as read only")

    for node in sorted((one for one in ast.walk(tree) if hasattr(one, "lineno")), key=lambda one: one.lineno):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                names.update((one.id, hint_of(value)) for one, value in pairs if isinstance(one, ast.Name))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            require(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = body.__globals__.get(node.func.id)
            taken = type_hints(called).values() if inspect.isfunction(called) and called in _contexts()[0].own else ()
            for given, hint in zip(node.args, taken, strict=False):
                if is_written(hint):
                    require(given)


def _compile(body: Callable[..., Any], arguments: Sequence[Any], result: Any, *, inlined: bool) -> Any:
    _refuse_stores(body)
    flags = compiler.Flags()
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
    flags.nrt = False
    flags.forceinline = inlined
    return compiler.compile_extra(*_contexts(), body, tuple(arguments), result, flags, {}, pipeline_class=_Pipeline)


def add_primitive(function: Callable[..., Any], body: Callable[..., Any], *, inlined: bool) -> None:
    """Make a function callable from loops: `body` is compiled for it, once for each set of argument types."""
    known: dict[tuple[Any, ...], Any] = {}

    class Call(AbstractTemplate):
        key = function

        def generic(self, args: Any, kws: Any) -> Any:
            if kws:
                return None
            given = tuple(map(_widened, args))
            if given not in known:
                made = _compile(body, given, None, inlined=inlined)
                _contexts()[1].insert_user_function(function, made.fndesc, [made.library])
                known[given] = signature(made.signature.return_type, *given)
            return known[given]

    _contexts()[0].own[function] = types.Function(Call)


def add_record(function: Callable[..., Any], kind: Any, *, ends: int) -> None:
    """Make a function callable from loops that gives a `kind` of arrays in a table of addresses; see `array_views.record`."""
    result = argument_type(kind, packed=True)

    class Call(AbstractTemplate):
        key = function

        def generic(self, args: Any, _kws: Any) -> Any:
            return signature(result, *map(_widened, args))

    def lowered(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def word(data: Any, index: Any) -> Any:
            return builder.load(builder.gep(data, [index]))

        def constant(number: int) -> Any:
            return context.get_constant(types.int64, number)

        data = [
            cgutils.create_struct_proxy(one)(context, builder, value).data if isinstance(one, View) else value
            for one, value in zip(sig.args, args, strict=True)
        ]
        arrays, ints = itertools.count(), itertools.count()

        def address_of(number: Any, column: int = 0) -> Any:
            return word(data[0], builder.add(builder.mul(number, constant(3)), constant(column)))

        def view_of(view: View) -> Any:
            number = builder.add(data[1], constant(next(arrays)))
            pointer = context.get_value_type(types.CPointer(view.dtype))
            values = builder.inttoptr(address_of(number), pointer)
            lengths = [address_of(number, axis + 1) for axis in range(view.ndim)]
            if ends:
                offsets = builder.inttoptr(address_of(builder.add(number, constant(ends))), data[0].type)
                first, end = word(offsets, data[2]), word(offsets, builder.add(data[2], constant(1)))
                values, lengths = builder.gep(values, [first]), [builder.sub(end, first)]
            return make_view(context, builder, view, values, lengths, ())

        def made(one: Any) -> Any:
            if isinstance(one, View):
                return view_of(one)
            if one == types.int64:
                return word(data[-1], constant(next(ints)))
            return context.make_tuple(builder, one, [made(part) for part in one.types])

        return made(result)

    _contexts()[1].insert_func_defn([(lowered, function, (types.VarArg(types.Any),))])
    _contexts()[0].own[function] = types.Function(Call)


def argument_type(hint: Any, *, packed: bool) -> Any:
    """Return the numba type of a loop's parameter of this annotation; arrays of NamedTuples are always packed."""
    parameter = parameter_of(hint, packed=packed)
    if parameter is None:
        return types.int64
    if not isinstance(parameter, list):
        return View(parameter.dtype, parameter.ndim, packed=parameter.packed)
    fields = [argument_type(one, packed=True) for one in type_hints(hint).values()]
    alike = len(set(fields)) == 1  # numba has a type of its own for those
    return types.NamedUniTuple(fields[0], len(fields), hint) if alike else types.NamedTuple(fields, hint)


def _widened(kind: Any) -> Any:
    """Return the type that an argument is passed as: int64 for all integers but uint64."""
    kind = types.unliteral(kind)
    narrow = isinstance(kind, types.Boolean) or (isinstance(kind, types.Integer) and kind != types.uint64)
    return types.int64 if narrow else kind


def object_code(
    loops: Callable[..., Any], arguments: Sequence[Any], entry: Callable[[str], str], symbols: Iterable[str]
) -> bytes:
    """Return the object file of loops with these numba types as arguments.

    `entry` gives LLVM's text of the only function that is to be called, given the name of the loops'; `symbols` are all that
    it may ask of the process: loops that ask for more, as those that allocate memory do, are a `TypeError`.
    """
    made = _compile(loops, arguments, types.void, inlined=False)
    context = pointers_context()
    module = llvm.parse_assembly(entry(made.fndesc.llvm_func_name), context)
    kept = {function.name for function in module.functions if not function.is_declaration}
    seen: set[int] = set()
    waiting = [made.library]
    while waiting:
        library = waiting.pop()
        if id(library) in seen:
            continue
        seen.add(id(library))
        if isinstance(library, _Texts):
            for text in library.texts:
                module.link_in(llvm.parse_assembly(text, context))
            waiting.extend(library.called)
        else:  # numba's own, compiled before
            module.link_in(llvm.parse_bitcode(library._get_module_for_linking().as_bitcode(), context))
    for thing in (*module.functions, *module.global_variables):
        if not thing.is_declaration and thing.name not in kept:
            thing.linkage = "internal"
    machine = _machine()
    module.data_layout = str(machine.target_data)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=_SPEED))
    builder.getModulePassManager().run(module, builder)
    called = {thing.name for thing in (*module.functions, *module.global_variables) if thing.is_declaration}
    unknown = {name for name in called if not name.startswith("llvm.")} - set(symbols)
    if unknown:
        raise TypeError(
            f"{loops.__name__} asks for {', '.join(sorted(unknown))}, expected a loop over what it is given"
        )
    code: bytes = machine.emit_object(module)
    return code


_SPEED: Final = 3


@functools.cache
def pointers_context() -> Any:
    """Return the context into which LLVM reads texts, None for its own.

    numba 0.61's llvmlite (0.44) writes typed pointers and reads no others, while our entries have opaque ones; a context
    made for these reads both.
    """
    if getattr(llvmlite, "opaque_pointers_enabled", True):
        return None
    return llvm.context.ContextRef(llvm.ffi.lib.LLVMPY_ContextCreate(True))


@functools.cache
def _machine() -> Any:
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=_SPEED,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )
