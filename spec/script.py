"""Choices as text, one a line: how a scenario is written and how a counterexample is printed.

``arrive r1 prompt=9 outputs=2``, ``accept r1 1``, ``run 0 main`` (until the stream blocks), ``run 0 main
3``, ``report r1 store 0``, ``schedule``, ``drain``. Fields stand in the order of
:data:`spec.events.SCHEMA`, or are written ``name=value``; those of :data:`DEFAULTS` may be left out.
"""

from __future__ import annotations

from spec.events import CHOICE, FIELDS, SCHEMA, Event, expected

CHOICES = {kind: names for kind, (category, names, _) in SCHEMA.items() if category == CHOICE}
DEFAULTS: dict[str, object] = {"family": "0", "ops": 0}


def parse(line: str) -> Event:
    """The choice that a line spells.  Raises ``ValueError`` that says what was expected."""
    kind, *words = line.split()
    if kind not in CHOICES:
        raise ValueError(f"unknown choice {kind!r}; expected one of {', '.join(CHOICES)}")
    names = CHOICES[kind]
    usage = " ".join((kind, *names))
    values: dict[str, object] = {}
    # Positional words fill the fields in order, those with a default last: `arrive r1 9 2` needs no family.
    places = sorted((n for n in names if f"{n}=" not in line), key=lambda name: name in DEFAULTS)
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            if not places:
                raise ValueError(f"{word!r} is one word too many; expected: {usage}")
            name, text = places.pop(0), word
        elif name not in names:
            raise ValueError(f"{kind!r} has no field {name!r}; expected: {usage}")
        values[name] = _value(name, text)
    missing = [name for name in names if name not in values and name not in DEFAULTS]
    if missing:
        raise ValueError(f"{kind!r} lacks {missing[0]!r}; expected: {usage}")
    return (kind, *(values.get(name, DEFAULTS.get(name)) for name in names))


def _value(name: str, text: str) -> object:
    value: object = text
    if name not in FIELDS:
        if not text.isdecimal():
            raise ValueError(f"field {name!r} is {text!r}; expected {expected(name)}, 0 or more")
        value = int(text)
    elif not FIELDS[name][0](text):
        raise ValueError(f"field {name!r} is {text!r}; expected {expected(name)}")
    return value


def line(choice: Event) -> str:
    """The text of a choice; ``parse(line(choice)) == choice``."""
    kind, *values = choice
    words = [kind]
    for name, value in zip(CHOICES[kind], values, strict=True):
        if name in DEFAULTS and value == DEFAULTS[name]:
            continue
        words.append(f"{name}={value}" if kind == "arrive" and name != "name" else str(value))
    return " ".join(words)
