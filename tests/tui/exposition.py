"""A reader of Prometheus text, written from its specification, to hold the writer to it.

It is strict where Prometheus, node_exporter or promtool are: names, escapes, one HELP and TYPE a
family before its samples, families in one piece, no sample twice, no time, a line feed at the end.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import re
from typing import NamedTuple

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\n"])*)"(,|$)')
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_HEAD = re.compile(rf"# (HELP|TYPE) ({_NAME}) (.+)")
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_NUMBER = re.compile(r"NaN|[+-]Inf|-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")


class Read(NamedTuple):
    """One family as it was read."""

    kind: str
    help: str
    samples: dict[tuple[tuple[str, str], ...], float]

    def value(self, **labels: str) -> float:
        """The one sample that has these labels, besides others."""
        (found,) = [
            value for key, value in self.samples.items() if labels.items() <= dict(key).items()
        ]
        return found


def parse(text: str) -> dict[str, Read]:
    """Return the families by name; fail at the first thing that is not as the format says."""
    assert text.endswith("\n")
    families: dict[str, Read] = {}
    helps: dict[str, str] = {}
    current = ""
    for line in text[:-1].split("\n"):
        head = _HEAD.fullmatch(line)
        if head is not None and head[1] == "HELP":
            assert head[2] not in helps, f"a second HELP: {line}"
            assert re.fullmatch(r"(?:[^\\]|\\[\\n])*", head[3])
            helps[head[2]] = head[3]
        elif head is not None:
            assert head[2] not in families, f"a second TYPE: {line}"
            assert head[3] in {"counter", "gauge"}
            current = head[2]
            families[current] = Read(head[3], helps[current], {})
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample is not None, line
            assert sample[1] == current, f"not within its family: {line}"
            assert _NUMBER.fullmatch(sample[3]), line
            key = tuple(sorted(_labels(sample[2] or "").items()))
            assert key not in families[current].samples, f"twice: {line}"
            families[current].samples[key] = float(sample[3])
    return families


def _labels(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        label = _LABEL.match(text, at)
        assert label is not None, text[at:]
        assert label[1] not in found, f"twice: {label[1]}"
        assert not label[1].startswith("__")
        found[label[1]] = re.sub(r"\\.", lambda escape: _ESCAPES[escape[0]], label[2])
        at = label.end()
    return found
