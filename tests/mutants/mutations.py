"""Small changes of a program, each of which a test should notice: one changed place in one file's syntax tree."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
    """A changed file: `line` and `change` say what was changed, `source` is the whole text."""

    path: str
    line: int
    change: str
    source: str


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """Yield each mutant of a file's functions; what only types, documents or words an error is left alone."""
    tree = ast.parse(source)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for statement in function.body:
            for node in _executed(statement):
                yield from _mutants_of(path, tree, node)


def _mutants_of(path: str, tree: ast.Module, node: ast.AST) -> Iterator[Mutant]:
    for attribute, changed in _changes(node):
        kept, before = getattr(node, attribute), ast.unparse(node)
        setattr(node, attribute, changed)
        after = ast.unparse(node)
        mutant = Mutant(
            path=path,
            line=getattr(node, "lineno", 0),
            change=f"{before.splitlines()[0]} -> {after.splitlines()[0]}",
            source=ast.unparse(tree),
        )
        setattr(node, attribute, kept)
        yield mutant


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is below it, without inner functions (they have their turn), annotations and errors."""
    if isinstance(node, (ast.FunctionDef, ast.Raise, ast.Import, ast.ImportFrom)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _executed(child)


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
