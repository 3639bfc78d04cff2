"""Names in source text."""

import ast


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name or of the function that is called."""
    while isinstance(node, ast.Call):
        node = node.func
    return getattr(node, "attr", getattr(node, "id", ""))


def decorators(node: ast.AST) -> set[str]:
    """Names of a function's or class's decorators."""
    return {last_name(each) for each in getattr(node, "decorator_list", [])}
