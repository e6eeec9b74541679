"""Small changes of a program, each of which a test should notice: one changed place in one file's syntax tree."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

# A boundary moved by one is the mistake that slot arithmetic invites, so each comparison has its neighbour.
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A change of a file: the `number`-th of its places, in `function`, in the `statement`-th statement of functions."""

    path: str
    number: int
    function: str
    statement: int
    line: int
    change: str
    repeat: int  # how often the same change was made in the function before

    @property
    def name(self) -> str:
        """Its name in `explained.toml` and among results, the same after lines have moved."""
        return f"{self.path}::{self.function}: {self.change}" + (f" #{self.repeat + 1}" if self.repeat else "")


class Place(NamedTuple):
    """A node of a function, and what to put into one of its attributes."""

    function: str
    statement: int
    node: ast.AST
    attribute: str
    changed: Any


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """Yield each mutant of a file's functions; what only types, documents or words an error is left alone."""
    seen: Counter[tuple[str, str]] = Counter()
    for number, place in enumerate(_places(ast.parse(source))):
        change = _apply(place)
        yield Mutant(
            path=path,
            number=number,
            function=place.function,
            statement=place.statement,
            line=getattr(place.node, "lineno", 0),
            change=change,
            repeat=seen[place.function, change],
        )
        seen[place.function, change] += 1


def mutated(mutant: Mutant, source: str) -> CodeType:
    """Return the code of the function that a mutant changes."""
    tree = ast.parse(source)
    place = next(place for number, place in enumerate(_places(tree)) if number == mutant.number)
    _apply(place, keep=True)
    return codes(tree)[mutant.function]


def marked(source: str, mark: str) -> tuple[dict[str, CodeType], int]:
    """Return the code of each function with `mark[number] = 1` before every statement, and how many statements there are."""
    tree = ast.parse(source)
    numbers = {id(statement): number for number, (_, statement) in enumerate(_statements(tree))}
    for node in [node for _, function in functions(tree) for node in ast.walk(function)]:
        for block in ("body", "orelse", "finalbody"):
            lines = getattr(node, block, None)
            if not isinstance(lines, list):
                continue
            after = []
            for line in lines:
                if id(line) in numbers:
                    note = ast.parse(f"{mark}[{numbers[id(line)]}] = 1").body[0]
                    after.append(ast.fix_missing_locations(ast.copy_location(note, line)))
                after.append(line)
            setattr(node, block, after)
    return codes(tree), len(numbers)


def codes(tree: ast.Module) -> dict[str, CodeType]:
    """Return the code of each function of a file and of its classes, by qualified name."""
    found, left = {}, [compile(tree, "<mutant>", "exec", dont_inherit=True)]
    names = {name for name, _ in functions(tree)}
    while left:
        for constant in left.pop().co_consts:
            if isinstance(constant, CodeType):
                left.append(constant)
                if constant.co_qualname in names:
                    found[constant.co_qualname] = constant
    return found


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a file and the methods of its classes by qualified name, but for a GPU's."""
    for node in tree.body:
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if not isinstance(function, ast.FunctionDef) or any(
                "jit" in ast.unparse(d) for d in function.decorator_list
            ):
                continue
            yield (f"{node.name}.{function.name}" if isinstance(node, ast.ClassDef) else function.name), function


def _statements(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for name, function in functions(tree):
        for line in function.body:
            yield from ((name, node) for node in ast.walk(line) if isinstance(node, ast.stmt))


def _places(tree: ast.Module) -> Iterator[Place]:
    numbers = {id(statement): number for number, (_, statement) in enumerate(_statements(tree))}
    for name, function in functions(tree):
        for line in function.body:
            yield from _within(name, line, 0, numbers)


def _within(function: str, node: ast.AST, statement: int, numbers: dict[int, int]) -> Iterator[Place]:
    """Yield the places of a node and of what is below it, without annotations, errors, and what `zip` is to refuse."""
    if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom)) or getattr(node, "arg", None) == "strict":
        return
    statement = numbers.get(id(node), statement)
    for attribute, changed in _changes(node):
        yield Place(function, statement, node, attribute, changed)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _within(function, child, statement, numbers)


def _apply(place: Place, *, keep: bool = False) -> str:
    """Make a change, say what it is, and take it back unless it is to be kept."""
    before, was = _text(place.node), getattr(place.node, place.attribute)
    setattr(place.node, place.attribute, place.changed)
    change = f"{before} -> {_text(place.node)}"
    if keep:
        ast.fix_missing_locations(place.node)
    else:
        setattr(place.node, place.attribute, was)
    return change


def _text(node: ast.AST) -> str:
    if isinstance(node, (ast.If, ast.While)):
        return f"{type(node).__name__.lower()} {ast.unparse(node.test)}"
    return ast.unparse(node).splitlines()[0]


def _changes(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield what to put into which attribute of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield "ops", [COMPARISONS[type(node.ops[0])]()]
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        yield "op", OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        yield "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "value", not node.value
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "value", node.value + 1
    elif isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, ast.Compare):
        yield "test", ast.UnaryOp(op=ast.Not(), operand=node.test)
