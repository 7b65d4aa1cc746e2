"""Word lint: finds private turns of phrase where plain technical English is meant.

    python -m tests.guards.words            # part of `make check`: fails at a new hit
    python -m tests.guards.words --update   # `make words`: prints all hits, lowers the budget

Checks comments and every string literal of three words or more (docstrings, errors, warnings, help)
in the packages and the examples, comments in the recipes, and the Markdown pages. Code blocks in
Markdown are not checked.

The budget, ``word_counts.json``, holds the hits that each file may have. It only shrinks: a file
that is not listed may have none, and ``--update`` gives renamed and merged files no more than what
the files that disappeared had in all. Without a budget file, ``--update`` writes one with all
present hits.
"""

import ast
import io
import json
import re
import sys
import tokenize
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BUDGET = Path(__file__).with_name("word_counts.json")

SOURCES = ["boltmesh/**/*.py", "configs/*.py", "examples/*.py", "strategies/**/*.py", "tui/**/*.py"]
RECIPES = ["configs/*.yaml"]
PAGES = ["*.md", "docs/*.md"]
LINKED = ("boltmesh/configs/", "boltmesh/strategies/", "boltmesh/tui/")
"""Links to folders at the root, which are checked there."""

WORDS = [
    # Persons in place of things.
    r"nobody",
    r"somebody",
    r"anybody",
    r"everybody",
    r"whoever",
    r"whom",
    r"(?:for|to|by|of|from|with) who",
    # Acts of speech and of will in place of operations.
    r"told",
    r"tells",
    r"asks",
    r"hears?",
    r"without a word",
    r"ha(?:s|ve) to say",
    r"what (?:it|they) says?",
    r"settle[sd]?",
    r"wish(?:es|ed)?",
    # Words of another century, or of another language.
    r"stands(?! for\b)",
    r"stood",
    r"alike",
    r"anew",
    r"mend(?:s|ed)?",
    r"midst",
    r"lest",
    r"those's",
    r"dealt out",
    r"shared? out",
    r"shares out",
    r"worked off",
    r"work off",
    r"gives? back what",
    r"what there is",
    r"all that there is",
    r"as nearly every",
]
OPENINGS = [r"Of (?!course\b)", r"Where there is no(?:ne|thing)\b", r"What is to be\b"]
"""No sentence begins so: the noun comes before its genitive, the thing before its place."""
FIRST_WORDS = [r"What (?![^.]*\?)", r"Who(?:se|m|ever)? (?![^.]*\?)"]
"""No docstring and no comment begins so: "Bytes on the disk", not "What is on the disk"."""


def _compile() -> re.Pattern[str]:
    words = "|".join(word.replace(" ", r"\s+") for word in WORDS)
    openings = "|".join(OPENINGS)
    first_words = "|".join(FIRST_WORDS)
    return re.compile(
        rf"\b(?:{words})\b"
        rf"|(?-i:(?:\A|(?<=[.:;?!]\s)|(?<=\n\n))\s*(?:{openings}))"
        rf"|(?-i:\A\s*(?:{first_words}))",
        flags=re.IGNORECASE,
    )


PATTERN = _compile()


class Text(NamedTuple):
    """A piece of prose and the line at which it begins."""

    line: int
    words: str


class Hit(NamedTuple):
    """A phrase of the list, where it is."""

    path: str
    line: int
    phrase: str


def find_hits(path: str, source: str) -> list[Hit]:
    """Return the hits in the text of a file, whose kind is read from the ending of ``path``."""
    if path.endswith(".py"):
        texts = [*_strings(source), *_comments(source)]
    elif path.endswith(".md"):
        texts = _paragraphs(source)
    else:
        texts = _hash_comments(source)
    return sorted(
        Hit(path, text.line + text.words.count("\n", 0, match.end()), " ".join(match[0].split()))
        for text in texts
        for match in PATTERN.finditer(_without_names(text.words))
    )


def _without_names(words: str) -> str:
    """Blank what is marked as code: a name is not prose."""
    return re.sub(r"`[^`\n]*`", lambda name: "x" * len(name[0]), words)


def _strings(source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value
            if len(words.split()) >= 3:
                yield Text(node.lineno, words)


def _comments(source: str) -> list[Text]:
    found = [
        Text(token.start[0], token.string.lstrip("#: "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return _join_lines(found)


def _hash_comments(source: str) -> list[Text]:
    lines = enumerate(source.splitlines(), start=1)
    return _join_lines([Text(n, line.split("#", 1)[1].strip()) for n, line in lines if "#" in line])


def _join_lines(found: Sequence[Text]) -> list[Text]:
    """Join comments of adjacent lines, so that a phrase may run over a line's end."""
    joined: list[Text] = []
    for text in found:
        if joined and text.line == joined[-1].line + joined[-1].words.count("\n") + 1:
            joined[-1] = Text(joined[-1].line, f"{joined[-1].words}\n{text.words}")
        else:
            joined.append(text)
    return joined


def _paragraphs(source: str) -> list[Text]:
    """Return the page as one text, code and link targets blanked, lines kept."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    prose = re.sub(r"^```.*?^```$", blank, source, flags=re.MULTILINE | re.DOTALL)
    # A cell of a table, an item of a list and a heading each begin a sentence.
    prose = re.sub(r"^(?:#+|-|\*|\d+\.) |\| ", ". ", prose, flags=re.MULTILINE)
    return [Text(1, prose)]


def _files() -> Iterator[Path]:
    for pattern in [*SOURCES, *RECIPES, *PAGES]:
        for path in sorted(ROOT.glob(pattern)):
            if not path.relative_to(ROOT).as_posix().startswith(LINKED):
                yield path


def lower(budget: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Return the budget lowered to the counts; what files now gone had may go to other files."""
    spare = sum(number for path, number in budget.items() if path not in counts)
    lowered = {}
    for path, number in sorted(counts.items()):
        own = min(number, budget.get(path, 0))
        moved = min(number - own, spare)
        spare -= moved
        lowered[path] = own + moved
    return _without_zeros(lowered)


def _without_zeros(counts: Mapping[str, int]) -> dict[str, int]:
    return {path: number for path, number in sorted(counts.items()) if number}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m tests.guards.words", description=__doc__)
    parser.add_argument("--update", action="store_true", help="print all hits, lower the budget")
    parser.add_argument("paths", nargs="*", help="print the hits of these files or folders only")
    options = parser.parse_args(arguments)

    hits = {
        path.relative_to(ROOT).as_posix(): find_hits(
            path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        )
        for path in _files()
    }
    if options.paths:
        chosen = [
            hit for path in hits if path.startswith(tuple(options.paths)) for hit in hits[path]
        ]
        _print(chosen)
        return 1 if chosen else 0

    budget = json.loads(BUDGET.read_text(encoding="utf-8")) if BUDGET.exists() else {}
    counts = {path: len(found) for path, found in hits.items()}
    if options.update:
        _print([hit for found in hits.values() for hit in found])
        budget = lower(budget, counts) if BUDGET.exists() else _without_zeros(counts)
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n", encoding="utf-8")
        print(f"{sum(counts.values())} hits, budget {sum(budget.values())}")
    over = [path for path, number in counts.items() if number > budget.get(path, 0)]
    for path in over:
        print(f"{path}: {counts[path]} phrases of the word list, {budget.get(path, 0)} allowed:")
        _print(hits[path])
    if over:
        print("Write them in plain technical English (CONTRIBUTING.md, Words).")
    return 1 if over else 0


def _print(hits: Sequence[Hit]) -> None:
    for hit in hits:
        print(f"{hit.path}:{hit.line}: {hit.phrase}")


if __name__ == "__main__":
    sys.exit(main())
