"""Questions and answers that every machine has: what functions and classes of Python code are for.

The question names a function with its parameters, the answer is its documentation, word for word.
A class is a conversation: first itself, then its methods. Code is parsed, never run.
"""

import ast
import inspect
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.text.rows import BadRows, Row

SYSTEM = "You explain Python code in the words of its documentation."
FOLLOW_UPS = 3
"""Methods that a conversation about a class asks for."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_docstrings(file: Path, columns: Sequence[str], bad: BadRows) -> Iterator[Row]:
    """One conversation for each documented function and class of a Python file."""
    del columns
    try:
        with warnings.catch_warnings():  # the code's own business, such as odd escapes
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        bad.add(f"{file}:{getattr(error, 'lineno', None) or 1}", f"not Python ({error})")
        return
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and (turns := list(_turns(node, file.stem))):
            said = [("system", SYSTEM), *turns]
            messages = [{"role": role, "content": text} for role, text in said]
            yield Row(f"{file}:{node.lineno}", {"messages": messages})


def _turns(node: Function | ast.ClassDef, module: str) -> Iterator[tuple[str, str]]:
    """Questions and answers in turn; none if there is no documentation."""
    answer = _answer(node)
    if answer is None:
        return
    if isinstance(node, Function):
        yield "user", f"What does {module}.{node.name}({ast.unparse(node.args)}) do?"
        yield "assistant", answer
        return
    yield "user", f"What is the class {module}.{node.name}?"
    yield "assistant", answer
    methods = [(n, a) for n in node.body if isinstance(n, Function) and (a := _answer(n))]
    for method, text in methods[:FOLLOW_UPS]:
        yield "user", f"And its method {method.name}({ast.unparse(method.args)})?"
        yield "assistant", text


def _answer(node: Any) -> str | None:
    text = ast.get_docstring(node, clean=False)
    return inspect.cleandoc(text).strip() or None if text else None
