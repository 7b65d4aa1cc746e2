"""Every sentence that a user can read, as one sorted text: errors, warnings, advice, findings.

    python -m tests.guards.errors        (or `make snapshot`)

rewrites ``errors.txt``; ``test_errors.py`` compares it with the source. So a review shows each
word of a message that changes, while moving code changes nothing: the text names no module, and
what an f-string fills in is ``{}``.

A line is what an error class of ours is called with, after the name of the class, or any other
string of four words or more. Docstrings are left out, and the help of commands and options, which
is in ``interface.txt``. Read from syntax trees: a message is here whether or not a test raises it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.guards.house import Module, source_modules

ERRORS = Path(__file__).with_name("errors.txt")
BASE = "BoltMeshError"
MIN_WORDS = 4


def errors() -> str:
    """Collect the sentences of all packages."""
    modules = list(source_modules())
    names = _error_classes(modules)
    found = {line for module in modules for line in _sentences(module.tree, names)}
    return "\n".join(sorted(found)) + "\n"


def _error_classes(modules: list[Module]) -> set[str]:
    classes = [
        (node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]
    names = {BASE}
    while new := {name for name, bases in classes if bases & names} - names:
        names |= new
    return names


def _sentences(node: ast.AST, names: set[str]) -> Iterator[str]:
    """The lines of a syntax tree."""
    if isinstance(node, ast.keyword) and node.arg == "help":
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    text = _text(node)
    if text is not None and len(text.split()) >= MIN_WORDS:
        yield text
    message = None
    if isinstance(node, ast.Call) and node.args:
        name = ast.unparse(node.func).rpartition(".")[2]
        text = _text(node.args[0])
        if name in names and text is not None:
            message = node.args[0]
            yield f"{name}: {text}"
    for child in ast.iter_child_nodes(node):
        is_part = isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)
        if child is message:
            for part in ast.iter_child_nodes(child):  # what it fills in may be a sentence too
                if not isinstance(part, ast.Constant):
                    yield from _sentences(part, names)
        elif not is_part:
            yield from _sentences(child, names)


def _text(node: ast.AST) -> str | None:
    """The literal text of a string or an f-string, on one line."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = [node.value]
    elif isinstance(node, ast.JoinedStr):
        parts = [_text(value) or "{}" for value in node.values]
    else:
        return None
    return "".join(parts).replace("\n", "\\n")


def main() -> None:
    ERRORS.write_text(errors(), encoding="utf-8")
    print(f"{ERRORS} is rewritten: read its difference before you commit it.")


if __name__ == "__main__":
    main()
