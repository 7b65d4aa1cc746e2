"""Keeps secrets out of what a job says of itself.

Command lines and hyperparameters are shown on screens, recorded and pasted into reports. What
looks like a secret, by its name or by its shape, is replaced before it is written anywhere.
"""

import re
from collections.abc import Iterable, Mapping

HIDDEN = "[redacted]"
_MAX_VALUE = 200

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
_SECRET_WORDS = frozenset({
    "apikey", "auth", "authorization", "cookie", "credential", "credentials", "key", "passphrase",
    "passwd", "password", "pwd", "secret", "secrets", "token",
})  # fmt: skip
_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{8,}|github_pat_\w{8,}"
    r"|glpat-[\w-]{8,}|xox[abprs]-[\w-]{8,}|AKIA[A-Z0-9]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/@\s]+@")
_ASSIGNMENT = re.compile(r"(--?|\+\+?)?([A-Za-z_][\w.\-]*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--?([A-Za-z][\w.\-]*)")


def is_secret_name(name: str) -> bool:
    """Tell whether a name says that its value is a secret: ``--hf-token``, ``model.apiKey``.

    Whole words count, so ``max_tokens`` and ``tokenizer`` are not secrets.
    """
    return any(word.lower() in _SECRET_WORDS for word in _WORD.findall(name))


def redact_text(text: str) -> str:
    """Replace what has the shape of a secret wherever it stands."""
    return _SHAPES.sub(HIDDEN, _USERINFO.sub(rf"\1{HIDDEN}@", text))


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
            dashes, name, _ = found.groups(default="")
            result.append(f"{dashes}{name}={HIDDEN}" if is_secret_name(name) else redact_text(word))
            continue
        option = _OPTION.fullmatch(word)
        hide_next = option is not None and is_secret_name(option[1])
        result.append(redact_text(word))
    return result


def redact_mapping(values: Mapping[str, object]) -> dict[str, str]:
    """Return values as short strings, those with a secret name hidden."""
    return {
        str(name): HIDDEN if is_secret_name(str(name)) else redact_text(_text(value))[:_MAX_VALUE]
        for name, value in values.items()
    }


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a user's object; the run does not hang on how it is shown
        return f"<{type(value).__name__}>"
