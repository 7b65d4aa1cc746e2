"""Keeps secrets out of the telemetry of a job.

Command lines and hyperparameters are shown on screens, recorded and pasted into reports. Values
that look like a secret, by their name or by their shape, are replaced before they are written.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from boltmesh.process import encodable

HIDDEN = "[redacted]"
_MAX_VALUE = 200
_MAX_DEPTH = 12

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SECRET_WORDS = frozenset({
    "apikey", "auth", "authorization", "cookie", "credential", "credentials", "key", "passphrase",
    "passwd", "password", "pwd", "secret", "secrets", "sig", "signature", "token",
})  # fmt: skip
_SECRET_ENDINGS = ("apikey", "passphrase", "passwd", "password", "secret")
"""Endings of words that are written together, such as PGPASSWORD."""
_COUNTS = frozenset(
    {"dim", "dims", "head", "heads", "id", "ids", "index", "layers", "length", "size"}
)
"""Last words of names whose whole numbers are sizes or places: ``num_key_value_heads``."""
_WHOLE = re.compile(r"-?[0-9]{1,9}")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|[rsp]k_(?:live|test)_[A-Za-z0-9]{8,}"
    r"|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|xox[abprs]-[\w-]{8,}"
    r"|A(?:KIA|SIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*)"
)
_AWS_SECRET = re.compile(
    r"(?<![\w/+=])(?=[^\s]{0,39}[A-Z])(?=[^\s]{0,39}[a-z])(?=[^\s]{0,39}\d)[A-Za-z0-9/+]{40}"
    r"(?![\w/+=])"
)
"""Forty characters of base64. A commit's hash has no capitals."""
_USERINFO = re.compile(r"""(://)[^/\s"']+@""")
_BEARER = re.compile(r"(\b(?:bearer|basic)\s+)[\w.~+/-]{6,}=*", re.IGNORECASE)
_NAME = re.compile(r"""(?<![\w.-])([\w.-]+)["']?\s*[:=]\s*""")
"""In ``name=value`` and ``name: value`` within a text: of a URL, a header, a mapping.

Texts may be long, so each pattern here takes time in proportion to their length.
"""
_VALUE = re.compile(
    r"""(?:(?:bearer|basic|digest|token)\s+)?(?:"[^"]*"|'[^']*'|[^\s"',;&}\]]+)""", re.IGNORECASE
)
_ASSIGNMENT = re.compile(r"(--?|\+\+?)?([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--?([A-Za-z][\w.\-]*)")


def is_secret_name(name: str) -> bool:
    """Tell whether a name says that its value is a secret: ``--hf-token``, ``model.apiKey``.

    Whole words count, so ``max_tokens`` and ``tokenizer`` are not secrets. ``KeyError`` is none.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    return words[-1:] not in (["error"], ["exception"], ["warning"]) and any(
        word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words
    )


def _is_hidden(name: str, value: object) -> bool:
    """Return whether a name and a value are a secret: ``pad_token_id: 0`` is none."""
    if not is_secret_name(name):
        return False
    is_count = [word.lower() for word in _WORD.findall(name)][-1] in _COUNTS
    return not (is_count and _WHOLE.fullmatch(_text(value)))


def redact_text(text: str) -> str:
    """Replace secrets in a text: by their shape, and by the name before them."""
    text = _redact_named(_USERINFO.sub(rf"\1{HIDDEN}@", text))
    return _AWS_SECRET.sub(HIDDEN, _SHAPES.sub(HIDDEN, _BEARER.sub(rf"\1{HIDDEN}", text)))


def _redact_named(text: str) -> str:
    parts, done = [], 0
    for found in _NAME.finditer(text):
        if found.start() < done or not is_secret_name(found[1]):
            continue
        value = _VALUE.match(text, found.end())
        if value is None or not _is_hidden(found[1], value[0]):
            continue
        if HIDDEN[:-1] not in value[0]:
            parts += [text[done : found.end()], HIDDEN]
            done = value.end()
    return "".join((*parts, text[done:]))


def redact_command(command: Iterable[str]) -> list[str]:
    """Return a command line without its secrets."""
    result: list[str] = []
    hide_next = False
    for word in command:
        if hide_next and not word.startswith("-"):
            result.append(HIDDEN)
            hide_next = False
            continue
        hide_next = False
        if found := _ASSIGNMENT.fullmatch(word):
            dashes, name, value = found.groups(default="")
            is_hidden = _is_hidden(name, value)
            result.append(f"{dashes}{name}={HIDDEN}" if is_hidden else redact_text(word))
            continue
        option = _OPTION.fullmatch(word)
        hide_next = option is not None and is_secret_name(option[1])
        result.append(redact_text(word))
    return result


def redact_mapping(values: Mapping[str, object]) -> dict[str, str]:
    """Return values as short strings, without secrets, also without those in nested mappings."""
    return {
        encodable(str(name)): HIDDEN
        if _is_hidden(str(name), value)
        else encodable(redact_text(_text(_redact(value)))[:_MAX_VALUE])
        for name, value in values.items()
    }


def holds_secret(value: object) -> bool:
    """Tell whether a config or hyperparameters have something in them that is to be hidden."""
    return HIDDEN in _text(_redact(value))


def _redact(value: Any, depth: int = 0) -> Any:
    """Replace secrets in nested mappings and lists."""
    if isinstance(value, str):
        return redact_text(value)
    if depth == _MAX_DEPTH:
        return "..."
    try:
        if isinstance(value, Mapping):
            return {
                name: HIDDEN
                if each not in (None, "") and _is_hidden(str(name), each)
                else _redact(each, depth + 1)
                for name, each in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [_redact(each, depth + 1) for each in value]
    except Exception:  # noqa: BLE001 - a user's object
        return f"<{type(value).__name__}>"
    return value


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a user's object; the run does not hang on how it is shown
        return f"<{type(value).__name__}>"
